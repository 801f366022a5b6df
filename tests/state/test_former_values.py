"""A body reads an object, and then puts another one in its place: a state of numbers and tensors, as an optimizer or a
sampler keeps it. Eager and captured twins give the same, also where users put other objects there, and where others
still have the former object."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # calls that differ are eager, and told


class Pair(NamedTuple):
    number: int
    tensor: Any


@dataclasses.dataclass
class Record:
    number: int
    tensor: Any = None
    log: list[Any] = dataclasses.field(default_factory=list)


class Plain:
    def __init__(self, number: int, tensor: Any) -> None:
        self.number, self.tensor = number, tensor


class Slotted:
    __slots__ = ("number", "tensor")

    def __init__(self, number: int, tensor: Any) -> None:
        self.number, self.tensor = number, tensor


def _noted(number: int, _: Any) -> Tensor:
    tensor: Any = zeros()
    tensor.number = number
    return tensor  # type: ignore[no-any-return]


KINDS: dict[str, tuple[Callable[[int, Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda n, t: (n, t), lambda held: held[0]),
    "list": (lambda n, t: [n, t], lambda held: held[0]),
    "dict": (lambda n, t: {"n": n, "t": t}, lambda held: held["n"]),
    "names of a dict": (lambda n, t: {f"k{n}": t}, lambda held: int(next(iter(held))[1:])),
    "class of a key": (lambda n, t: {1 if n == 1 else "1": t}, lambda held: 5 if "1" in held else 1),
    "True as a key": (lambda n, t: {n == 1 or 1: t}, lambda held: 1 if next(iter(held)) is True else 5),
    "number of members": (lambda n, t: [t] * n, len),
    "numbers alone": (lambda n, _: (n, "text"), lambda held: held[0]),
    "namedtuple": (Pair, lambda held: held.number),
    "dataclass": (Record, lambda held: held.number),
    "plain object": (Plain, lambda held: held.number),
    "slots": (Slotted, lambda held: held.number),
    "namespace": (lambda n, t: types.SimpleNamespace(n=n, t=t), lambda held: held.n),
    "deque": (lambda n, t: collections.deque([n, t]), lambda held: held[0]),
    "OrderedDict": (lambda n, t: collections.OrderedDict(n=n, t=t), lambda held: held["n"]),
    "nested": (lambda n, t: {"a": [(n, t)]}, lambda held: held["a"][0][0]),
    "nested objects": (lambda n, t: (Record(n, t), [Plain(n, t)]), lambda held: held[0].number + held[1][0].number),
    "shape of a tensor": (lambda n, _: torch.zeros(n, device=DEVICE), lambda held: held.shape[0]),
    "shape of one in a tuple": (lambda n, t: (t, torch.zeros(n, device=DEVICE)), lambda held: held[1].shape[0]),
    "attribute of a tensor": (_noted, lambda held: held.number),
    "none": (lambda n, t: None if n == 1 else (n, t), lambda held: 1 if held is None else held[0]),
}


def zeros() -> Tensor:
    return torch.zeros(2, device=DEVICE)


def text_of(value: Any) -> Any:
    """What a value holds, to compare."""
    if isinstance(value, Tensor):
        return value.tolist(), value.dtype
    if isinstance(value, dict):
        return {key: text_of(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value).__name__, [text_of(one) for one in value]
    if isinstance(value, (Record, Plain, types.SimpleNamespace)):
        return type(value).__name__, text_of(vars(value))
    if isinstance(value, Slotted):
        return value.number, text_of(value.tensor)
    return value


def outcome(body: Callable[..., Any], make: Callable[[], Any], change: Callable[[Any, int], Any], *, twin: bool) -> Any:
    """The results of ten calls and the state after each. ``change`` alters the state before the sixth and ninth."""
    state, results, former = make(), list[Any](), list[Any]()
    f = capture(lambda x: body(state, x)) if twin else lambda x: body(state, x)
    for number in range(10):
        if number in (5, 8):
            change(state, number)
        former.append(state.held)
        y = f(torch.full((2,), 1.0 + number, device=DEVICE))
        results.append([y.tolist(), text_of(state.held), [text_of(one) for one in former]])
    return results, recordings(f).replays if twin else 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", KINDS)
def test_what_users_put_in_the_place_is_read(name: str) -> None:
    make, use = KINDS[name]

    def body(state: Any, x: Tensor) -> Any:
        held = state.held
        state.held = make(1, x * 2)
        return x * use(held)

    def change(state: Any, number: int) -> None:
        state.held = make(7 + number, zeros())

    def begin() -> Any:
        return types.SimpleNamespace(held=make(1, zeros()))

    (ours, replays), (eager, _) = (outcome(body, begin, change, twin=twin) for twin in (True, False))
    assert ours == eager
    assert replays >= 1


def _counts_in_a_tuple(state: Any, x: Tensor) -> Any:
    state.held = (state.held[0] + 1, state.held[1] + x)
    return x + state.held[1]


def _counts_by_replace(state: Any, x: Tensor) -> Any:
    state.held = dataclasses.replace(state.held, number=state.held.number + 1, tensor=x * 2)
    return x + state.held.number


def _takes_a_list_along(state: Any, x: Tensor) -> Any:
    state.held = Record(3, x * 2, state.held.log)
    return x + 1


def _marks_the_former(state: Any, x: Tensor) -> Any:
    state.held.number, state.held.tensor = 9, x * 3
    state.held = Record(1, x * 2)
    return x + 1


def _marks_it_afterwards(state: Any, x: Tensor) -> Any:
    former, state.held = state.held, Record(1, x * 2)
    former.number = 9
    former.log.append(x * 3)
    return x + 1


def _fills_and_replaces(state: Any, x: Tensor) -> Any:
    state.held.log.append(x * 2)
    state.held.log = state.held.log[-2:]
    return x + 1


def _hands_over_and_begins_anew(state: Any, x: Tensor) -> Any:
    state.held.log.append(x * 2)
    state.held.tensor = state.held.log
    state.held.log = []
    return x + 1


def _fills_a_dict(state: Any, x: Tensor) -> Any:
    state.held["more"] = x * 2
    state.held = {"number": 1, "tensor": x * 3}
    return x + 1


BODIES: dict[Callable[..., Any], Callable[[int], Any]] = {
    _counts_in_a_tuple: lambda n: (n, zeros()),
    _counts_by_replace: Record,
    _takes_a_list_along: Record,
    _marks_the_former: Record,
    _marks_it_afterwards: Record,
    _fills_and_replaces: Record,
    _hands_over_and_begins_anew: Record,
    _fills_a_dict: lambda n: {"number": n},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_former_objects_are_left_as_eager_leaves_them(body: Callable[..., Any]) -> None:
    def change(state: Any, number: int) -> None:
        state.held = BODIES[body](number)

    def begin() -> Any:
        return types.SimpleNamespace(held=BODIES[body](1))

    ours, eager = (outcome(body, begin, change, twin=twin)[0] for twin in (True, False))
    assert ours == eager


def test_a_state_that_nobody_looks_into_is_replayed() -> None:
    state = types.SimpleNamespace(held=(1, zeros()))

    def body(x: Tensor) -> Tensor:
        state.held = (1, x * 2)
        return x + 1

    f = capture(body)
    for number in range(8):
        state.held = (number, zeros())
        x = torch.full((2,), 1.0 + number, device=DEVICE)
        assert f(x).tolist() == (x + 1).tolist()
        assert state.held[0] == 1
        assert state.held[1].tolist() == (x * 2).tolist()
    assert recordings(f).replays >= 5


def _of_a_tuple(first: Any, x: Tensor) -> Any:
    former, first.held = first.held, (2, x * 2)
    return x * former[0]


def _of_a_record(first: Any, x: Tensor) -> Any:
    former, first.held = first.held, Record(2, x * 2)
    return x * former.number


def _in_a_dict(first: Any, x: Tensor) -> Any:
    former, first.held["more"] = first.held["more"], (2, x * 2)
    return x * former[0]


BELOW: dict[Callable[..., Any], Callable[[int, Tensor], Any]] = {
    _of_a_tuple: lambda number, x: types.SimpleNamespace(held=(number, x), x=x),
    _of_a_record: lambda number, x: types.SimpleNamespace(held=Record(number, x), x=x),
    _in_a_dict: lambda number, x: types.SimpleNamespace(held={"more": (number, x), "x": x}),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", BELOW, ids=lambda body: body.__name__.strip("_"))
@pytest.mark.parametrize("way", ["positional", "named", "static"])
def test_former_values_in_arguments_that_are_others_in_each_call(body: Callable[..., Any], way: str) -> None:
    def taking_names(x: Tensor, **rest: Any) -> Any:
        return body(rest["first"], x)

    f = capture(body, static=["first"]) if way == "static" else capture(taking_names if way == "named" else body)
    for number in range(14):
        factor = 7 if number in (9, 12) else 1
        x = torch.full((2,), 1.0 + number, device=DEVICE)
        mine, twin = BELOW[body](factor, x + 1), BELOW[body](factor, x + 1)
        y = f(x=x, first=mine) if way == "named" else f(mine, x)
        assert y.tolist() == body(twin, x).tolist() == (x * factor).tolist()
        assert text_of(mine) == text_of(twin)
    if way != "static":  # then a recording is bound to one object
        assert recordings(f).replays >= 4


def test_former_values_in_an_object_below_an_argument_that_is_not_opened() -> None:
    """The module is the same in each call, and what it holds is no part of the key."""
    module: Any = torch.nn.Module()

    def body(batch: Any, x: Tensor) -> Any:
        former, batch["module"].held = batch["module"].held, (1, x * 2)
        return x * former[0]

    f = capture(body)
    module.held = (1, zeros())
    for number in range(16):
        if number in (10, 13):
            module.held = (7 + number, zeros())
        factor = module.held[0]
        x = torch.full((2,), 1.0 + number, device=DEVICE)
        assert f({"module": module}, x).tolist() == (x * factor).tolist()
        assert text_of(module.held) == text_of((1, x * 2))
    assert recordings(f).replays >= 4
