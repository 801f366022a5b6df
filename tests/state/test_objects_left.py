"""Objects that a body leaves in Python state in each call replay, and what is read of them is compared or an input."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, config, recordings

CALLS, REPLAYED = 14, 8
"""How many calls are made, and how many of them are replays: on a GPU the first two recordings may be made anew."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


class Stepping:
    """What the objects of this test have in common, with something that code looks up in the class."""

    factor = 0.5
    h: Tensor
    scale: float

    def next(self, x: Tensor) -> Any:
        made = copy.copy(self)
        made.h = self.h * self.factor * self.scale + x.sum()
        return made

    @property
    def doubled(self) -> Tensor:
        return self.h * 2


@dataclasses.dataclass
class Fields(Stepping):
    h: Tensor
    scale: float = 1.0

    @override
    def next(self, x: Tensor) -> Any:
        return dataclasses.replace(self, h=self.h * self.factor * self.scale + x.sum())


class Plain(Stepping):
    def __init__(self, h: Tensor) -> None:
        self.h, self.scale = h, 1.0

    @override
    def next(self, x: Tensor) -> Any:
        made = type(self)(self.h * self.factor * self.scale + x.sum())
        made.scale = self.scale
        return made


class Slots(Stepping):
    __slots__ = ("h", "scale")

    def __init__(self, h: Tensor) -> None:
        self.h, self.scale = h, 1.0

    @override
    def next(self, x: Tensor) -> Any:
        made = type(self)(self.h * self.factor * self.scale + x.sum())
        made.scale = self.scale
        return made


@attrs.define
class Attrs(Stepping):
    h: Tensor
    scale: float = 1.0

    @override
    def next(self, x: Tensor) -> Any:
        return attrs.evolve(self, h=self.h * self.factor * self.scale + x.sum())


class Mapping(collections.OrderedDict[str, Any]):
    """As the outputs of models in transformers: members that are attributes, too."""

    factor = 0.5

    def __init__(self, h: Any = ()) -> None:
        super().__init__(h=h)
        self.scale = 1.0

    @property
    def h(self) -> Tensor:
        value: Tensor = self["h"]
        return value

    @h.setter
    def h(self, value: Tensor) -> None:
        self["h"] = value

    def next(self, x: Tensor) -> Any:
        made = type(self)(self.h * self.factor * self.scale + x.sum())
        made.scale = self.scale
        return made

    @property
    def doubled(self) -> Tensor:
        return self.h * 2


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Fields, "plain": Plain, "slots": Slots, "attrs": Attrs, "mapping": Mapping,
}  # fmt: skip


class Keeper:
    """Reads the object that it left in the call before."""

    def __init__(self, made: Any) -> None:
        self.state, self.best = made, None

    def step(self, x: Tensor) -> Tensor:
        self.state = self.state.next(x)
        result: Tensor = self.state.doubled + x
        return result


class Layers:
    """The same for objects in a list and a dict."""

    def __init__(self, made: Any) -> None:
        self.all: list[Any] = [made, copy.copy(made)]
        self.named: dict[str, Any] = {"a": copy.copy(made)}

    @property
    def state(self) -> Any:
        return self.all[0]

    @state.setter
    def state(self, value: Any) -> None:
        self.all[0] = value

    def step(self, x: Tensor) -> Tensor:
        total = x
        for at, one in enumerate(self.all):
            self.all[at] = one.next(x)
            total = total + self.all[at].doubled
        self.named["a"] = self.named["a"].next(total)
        result: Tensor = total + self.named["a"].h
        return result


class Kept:
    """Keeps the object, and reads parts of it by the way to them."""

    def __init__(self, made: Any) -> None:
        self.state, self.best = made, None

    def step(self, x: Tensor) -> Tensor:
        h: Tensor = self.state.h * self.state.scale * self.state.factor + x.sum()
        self.state = self.state.next(x)
        self.state.h = h
        self.best = self.state
        return h + x


HOLDERS: tuple[Any, ...] = (Keeper, Layers, Kept)


def in_place(holder: Any) -> None:
    holder.state.h = torch.full((), 7.0)


def written(holder: Any) -> None:
    holder.state.h.add_(3)


def scaled(holder: Any) -> None:
    holder.state.scale = 2.0


def replaced(holder: Any) -> None:
    made = copy.copy(holder.state)
    made.h = torch.full((), 5.0)
    holder.state = made


def of_another_shape(holder: Any) -> None:
    holder.state.h = torch.arange(2.0)


def of_another_dtype(holder: Any) -> None:
    holder.state.h = holder.state.h.double()


def of_another_class(holder: Any) -> None:
    holder.state = Quarter(holder.state.h.clone())


def with_another_class(holder: Any) -> None:
    if type(holder.state) is Plain:
        holder.state.__class__ = Quarter


def deleted(holder: Any) -> None:
    if type(holder.state) is not Mapping:
        del holder.state.h


def removed(holder: Any) -> None:
    holder.state = None


def aliased(holder: Any) -> None:
    holder.best = holder.state
    if type(holder) is Layers:
        holder.all[1] = holder.named["a"] = holder.all[0]


def shared(holder: Any) -> None:
    """One tensor in two objects."""
    if type(holder) is Layers:
        holder.all[1].h = holder.all[0].h
    else:
        holder.best = copy.copy(holder.state)


def hidden(holder: Any) -> None:
    """An attribute hides the one of the class."""
    if hasattr(holder.state, "__dict__"):
        holder.state.factor = 0.125


class Quarter(Plain):
    factor = 0.25


CHANGES = (
    in_place, written, scaled, replaced, of_another_shape, of_another_dtype, of_another_class, with_another_class,
    deleted, removed, aliased, shared, hidden,
)  # fmt: skip


def told(value: Any, seen: dict[int, int]) -> Any:
    """What can be seen of state: classes, values, and which objects are one."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.tolist())
    if isinstance(value, (int, float, str, type(None))):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        members = [*value.items(), *(vars(value).items() if hasattr(value, "__dict__") else ())]
    elif isinstance(value, (list, tuple, collections.deque)):
        members = [*enumerate(value)]
    else:
        names = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
        members = [(name, getattr(value, name)) for name in names if hasattr(value, name) and name[0] != "_"]
        members += [*vars(value).items()] if hasattr(value, "__dict__") else []
    return type(value).__name__, [(name, told(member, seen)) for name, member in members]


def outcomes(
    holder: Any, step: Callable[[Tensor], Any], change: Callable[[Any], None] | None = None, calls: int = CALLS
) -> list[Any]:  # fmt: skip
    """What the calls give, or raise, and leave. The state is changed after half of them."""
    found = []
    for number in range(calls):
        if change is not None and number == calls // 2:
            change(holder)
        try:
            result = told(step(torch.full((2,), float(number % 5))), {})
        except (AttributeError, TypeError) as error:
            result = type(error)
        found.append((result, told(holder, {})))
    return found


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_replays(kind: str, holder: Any) -> None:
    alone, ours = holder(KINDS[kind](torch.ones(()))), holder(KINDS[kind](torch.ones(())))
    step = capture(ours.step)
    assert outcomes(alone, alone.step) == outcomes(ours, step)
    assert recordings(step).replays >= REPLAYED


@pytest.mark.one_in(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_compared(kind: str, holder: Any, change: Callable[[Any], None]) -> None:
    alone, ours = holder(KINDS[kind](torch.ones(()))), holder(KINDS[kind](torch.ones(())))
    assert outcomes(alone, alone.step, change) == outcomes(ours, capture(ours.step), change)


def _quartered(self: Any, x: Tensor) -> Any:
    return type(self)(self.h * 0.25 + x.sum())


@pytest.mark.parametrize(("name", "value"), [("factor", 0.25), ("next", _quartered), ("doubled", 3.0)])
@pytest.mark.parametrize("holder", [Keeper, Layers])
def test_what_its_class_has_is_compared(holder: Any, name: str, value: Any) -> None:
    """No code names the class: it is reached by the object alone."""
    told = []
    for keep in (_as_it_is, capture):
        with pytest.MonkeyPatch.context() as patch:
            ours = holder(Plain(torch.ones(())))
            change = functools.partial(patch.setattr, Plain, name, value)
            told.append(outcomes(ours, keep(ours.step), lambda _, change=change: change()))  # type: ignore[misc]
    assert told[0] == told[1]


def _as_it_is(body: Any) -> Any:
    return body


class Opened(Plain):
    """Of a class that torch's pytree opens, with a number that is no member there."""


def _closed(members: Any, scale: Any) -> Opened:
    made = Opened(members[0])
    made.scale = scale
    return made


torch.utils._pytree.register_pytree_node(Opened, lambda opened: ([opened.h], opened.scale), _closed)


@pytest.mark.parametrize("change", [scaled, in_place, replaced])
def test_what_a_registered_class_leaves_out_is_compared(change: Callable[[Any], None]) -> None:
    alone, ours = Kept(Opened(torch.ones(()))), Kept(Opened(torch.ones(())))
    assert outcomes(alone, alone.step, change) == outcomes(ours, capture(ours.step), change)
