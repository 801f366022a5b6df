"""Objects of plain classes as arguments and results are opened: what they hold is in the key, not who they are."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, recordings, register_container
from capture.key import objects
from tests.support.device import AGAIN
from tests.support.keys import A, bits, x_of
from tests.support.keys import fresh as fresh


class Pair:
    def __init__(self, a: Any, b: Any, scale: float = 2.0) -> None:
        self.a, self.b, self.scale = a, b, scale


class Slotted:
    __slots__ = ("k", "x")

    def __init__(self, x: Tensor, k: int) -> None:
        self.x, self.k = x, k


class SlottedMore(Slotted):
    def __init__(self, x: Tensor, k: int) -> None:
        super().__init__(x, k)
        self.more = x + 1


class Batch(collections.UserDict[str, Any]):
    """A mapping with attributes, like ``transformers.BatchEncoding``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Attributes(dict[str, Any]):
    def __init__(self, **members: Any) -> None:
        super().__init__(**members)
        self.__dict__ = self


class Rows(list[Tensor]):
    name = "rows"


class Store:
    def __init__(self, parent: Data) -> None:
        self.parent = weakref.ref(parent)
        self.members: dict[str, Any] = {}


class Data:
    """An object with its members in a store that refers back to it, like ``torch_geometric.data.Data``."""

    def __init__(self, **members: Any) -> None:
        self.__dict__["store"] = Store(self)
        self.store.members.update(members)

    def __getattr__(self, name: str) -> Any:
        if name == "store":
            raise AttributeError(name)
        return self.store.members[name]

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        self.store.members[name] = value


@attrs.define
class Defined:
    x: Tensor
    k: int = 3


@dataclasses.dataclass
class WithHidden:
    x: Tensor

    def __post_init__(self) -> None:
        self.hidden = self.x + 1


class Bomb:
    """Its methods raise: none of them may run while an instance is opened."""

    def __init__(self, x: Tensor) -> None:
        object.__setattr__(self, "x", x)

    def _goes_off(self, *_: Any) -> Any:
        raise RuntimeError("code of the class ran")

    __copy__ = __deepcopy__ = __reduce_ex__ = __len__ = __iter__ = __bool__ = __eq__ = _goes_off
    __getattr__ = __repr__ = __contains__ = __getitem__ = _goes_off


class Node:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.next: Any = None


def ring(seed: int) -> Node:
    first, second = Node(x_of(seed)), Node(x_of(seed + 100))
    first.next, second.next = second, first
    return first


READ: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "object": (lambda p: p.a * p.scale + p.b, lambda n: Pair(x_of(n), x_of(n + 50))),
    "one of slots": (lambda p: p.x * p.k, lambda n: Slotted(x_of(n), 2)),
    "slots and more": (lambda p: p.x * p.k + p.more, lambda n: SlottedMore(x_of(n), 2)),
    "user dict": (lambda b: b["x"] * 2 + b.y, lambda n: Batch(x=x_of(n), y=x_of(n + 50))),
    "attributes are items": (lambda b: b["x"] * 2 + b.y, lambda n: Attributes(x=x_of(n), y=x_of(n + 50))),
    "list": (lambda rows: rows[0] * len(rows) + rows[1], lambda n: Rows([x_of(n), x_of(n + 50)])),
    "default dict": (
        lambda d: d["x"] + d["y"][0],
        lambda n: collections.defaultdict(list, {"x": x_of(n), "y": [x_of(n + 50)]}),
    ),
    "namespace": (
        lambda s: s.x * s.more.k,
        lambda n: types.SimpleNamespace(x=x_of(n), more=types.SimpleNamespace(k=2)),
    ),
    "graph": (lambda d: d.x + d.e * 2, lambda n: Data(x=x_of(n), e=x_of(n + 50))),
    "attrs": (lambda d: d.x * d.k, lambda n: Defined(x_of(n))),
    "hidden beside fields": (lambda d: d.x * d.hidden, lambda n: WithHidden(x_of(n))),
    "nested": (lambda p: p.a[0].x + p.b["y"].a, lambda n: Pair([Slotted(x_of(n), 1)], {"y": Pair(x_of(n + 50), 1)})),
    "cycle": (lambda node: node.x * 2 + node.next.x + node.next.next.x, ring),
    "code of its own": (lambda bomb: bomb.x * 2, lambda n: Bomb(x_of(n))),
    "distribution": (
        lambda d: d.log_prob(A),
        lambda n: torch.distributions.Normal(x_of(n), x_of(n + 50).exp(), validate_args=False),
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", READ)
def test_new_objects_of_equal_content_replay(name: str) -> None:
    body, make = READ[name]
    mine = capture(body)
    for n in range(8):
        assert bits(mine(make(n))) == bits(body(make(n)))
    assert (recordings(mine).observations, recordings(mine).recordings) == (1, 1)


MADE: dict[str, Callable[[Tensor], Any]] = {
    "object": lambda x: Pair(x * 2, [x + 1, {"k": x - 1}]),
    "slots": lambda x: SlottedMore(x * 2, 5),
    "user dict": lambda x: Batch(x=x * 2, n=3),
    "attributes are items": lambda x: Attributes(x=x * 2),
    "list": lambda x: Rows([x, x * 2]),
    "namespace": lambda x: types.SimpleNamespace(x=x * 2, k=1),
    "graph": lambda x: Data(x=x * 2, e=x + 1),
    "attrs": lambda x: Defined(x * 2, 4),
    "hidden beside fields": lambda x: WithHidden(x * 2),
    "the same twice": lambda x: (lambda p: (p, [p]))(Pair(x * 2, 1)),
    "distribution": lambda x: torch.distributions.Normal(x, x.exp(), validate_args=False),
}


def _content(value: Any) -> Any:
    """All that an object holds, in a form that can be compared."""
    if isinstance(value, weakref.ref):
        return "reference", type(value())
    if isinstance(value, (list, tuple)):
        return type(value), [_content(member) for member in value]
    own = {name: getattr(value, name) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    own |= value if isinstance(value, dict) else getattr(value, "__dict__", {})
    if isinstance(value, Tensor) or not own:
        return bits(value)
    return type(value), {name: _content(member) for name, member in own.items()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MADE)
def test_objects_as_results(name: str) -> None:
    body = MADE[name]
    mine = capture(body)
    kept = [(mine(x_of(n)), _content(body(x_of(n)))) for n in range(8)]
    assert [_content(got) for got, _ in kept] == [expected for _, expected in kept]
    assert len({id(got) for got, _ in kept}) == 8
    assert recordings(mine).replays == 6 - AGAIN


def test_what_holds_together_in_a_result_holds_together_in_each_replay() -> None:
    def body(x: Tensor) -> Any:
        node = Node(x * 2)
        node.next = Node(x + 1)
        node.next.next = node
        return node, Data(x=x), [node]

    mine = capture(body)
    for n in range(5):
        node, data, again = mine(x_of(n))
        assert node.next.next is node
        assert again[0] is node
        assert data.store.parent() is data
    assert recordings(mine).replays == 3 - AGAIN


# ----------------------------------------------------------------------------------------------- what is in the key


def test_plain_members_and_structure_tell_calls_apart() -> None:
    def body(p: Any) -> Any:
        return p.a * p.scale + (0 if p.b is None else p.b)

    mine = capture(body, max_recordings=20)
    cases: list[Callable[[], Any]] = [
        lambda: Pair(x_of(1), x_of(2)), lambda: Pair(x_of(1), None), lambda: Pair(x_of(1), x_of(2), 3.0),
        lambda: Pair(x_of(1), x_of(2), 3), lambda: Pair(x_of(1), 1), lambda: Pair(x_of(1), True),
        lambda: types.SimpleNamespace(a=x_of(1), b=None, scale=2.0),
    ]  # fmt: skip
    for _ in range(4):
        for make in cases:
            assert bits(mine(make())) == bits(body(make()))
    assert recordings(mine).recordings == len(cases)


def test_one_object_twice_is_not_two_of_equal_content() -> None:
    def body(first: Any, second: Any) -> Any:
        first.scale = first.scale + 1 if isinstance(first.scale, Tensor) else first.a * 3
        return second.a * second.scale

    mine = capture(body)
    for n in range(12):
        for way in (0, 1):
            first, twin = Pair(x_of(n), 1), Pair(x_of(n), 1)
            second, second_twin = (first, twin) if way else (Pair(x_of(n), 1), Pair(x_of(n), 1))
            assert bits(mine(first, second)) == bits(body(twin, second_twin))
            assert bits(first.scale) == bits(twin.scale)


def test_configs_that_are_new_in_every_call_are_told_apart_by_content() -> None:
    class Config:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    mine = capture(lambda x, config: x * config.scale + 1)
    for n in range(24):
        scale = float(2 + n // 12)
        assert bits(mine(x_of(n), Config(scale))) == bits(x_of(n) * scale + 1)
        if n % 8 == 0:
            gc.collect()
    assert recordings(mine).replays >= 16


def test_an_attribute_of_its_class_is_seen() -> None:
    class Scaled:
        scale = 2.0

        def __init__(self, x: Tensor) -> None:
            self.x = x

    mine = capture(lambda p: p.x * p.scale)
    for n in range(12):
        Scaled.scale = float(n // 6)
        assert bits(mine(Scaled(x_of(n)))) == bits(x_of(n) * Scaled.scale)


# --------------------------------------------------------------------------------------------- what the body changes


def put(pair: Any, **members: Any) -> Any:
    for name, value in members.items():
        setattr(pair, name, value)
    return pair


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "set": lambda p, x: put(p, last=x * 2).a.sum(),
    "replaced": lambda p, x: put(p, a=p.a + x).a.sum(),
    "in place": lambda p, x: p.a.add_(x),
    "both": lambda p, x: (put(p, a=p.a + x).a.mul_(2), p.b.add_(1))[0],
    "nested": lambda p, x: put(p, b=types.SimpleNamespace(y=x * 2)).a * 1,
    "given back": lambda p, x: put(p, a=x * 2),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kept", [True, False])
def test_the_callers_own_object_is_changed(name: str, *, kept: bool) -> None:
    body = CHANGES[name]
    mine = capture(body)
    pair, twin = Pair(x_of(1), x_of(2)), Pair(x_of(1), x_of(2))
    for n in range(8):
        if not kept:
            pair, twin = Pair(x_of(n + 1), x_of(n + 2)), Pair(x_of(n + 1), x_of(n + 2))
        got, expected = mine(pair, x_of(n)), body(twin, x_of(n))
        if name == "given back":
            assert got is pair
        else:
            assert bits(got) == bits(expected)
        assert _content(pair) == _content(twin)
    if name != "nested" or not kept:
        assert recordings(mine).replays >= 4


def test_a_cache_that_a_body_fills() -> None:
    """It is empty at first; later calls get it filled, and then another one that is empty."""

    class Layer:
        keys: Tensor | None = None

        def update(self, keys: Tensor) -> Tensor:
            self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
            return self.keys

    class Cache:
        def __init__(self) -> None:
            self.layers = [Layer(), Layer()]

    def step(cache: Cache, x: Tensor) -> Tensor:
        return cache.layers[0].update(x) * 2

    mine = capture(step, max_recordings=10)
    for n in range(8):
        cache, twin = Cache(), Cache()
        for k in range(3):
            assert bits(mine(cache, x_of(n + k))) == bits(step(twin, x_of(n + k)))
            assert bits(cache.layers[0].keys) == bits(twin.layers[0].keys)
    assert recordings(mine).replays >= 12


HELD: Any = None


@pytest.mark.parametrize("at", ["global", "attribute", "closure"])
def test_an_object_that_state_holds_too_and_the_body_changes(at: str) -> None:
    """The object is reached in two ways. A copy of the argument would not show the change in the other place."""

    def update(held: Any, pair: Any, x: Tensor) -> Any:
        pair.a = x * 2
        return held.a + pair.b

    class Net(nn.Module):
        held: Any = None

        @override
        def forward(self, pair: Any, x: Tensor) -> Any:
            return update(self.held, pair, x)

    def build() -> tuple[Callable[..., Any], Any]:
        pair = Pair(x_of(1), x_of(2))
        net = Net()
        net.held = pair
        if at == "attribute":
            return net, pair
        return (lambda pair, x: update(HELD, pair, x)) if at == "global" else (lambda p, x: update(pair, p, x)), pair

    global HELD
    (body, pair), (eager, twin) = build(), build()
    mine = capture(body)
    for n in range(6):
        HELD = pair
        with pytest.warns(CaptureWarning, match="is also") if n == 0 else contextlib.nullcontext():
            got = mine(pair, x_of(n))
        HELD = twin
        assert bits(got) == bits(eager(twin, x_of(n)))
        assert bits(pair.a) == bits(twin.a)
    HELD = None


# -------------------------------------------------------------------------------------------- registered by the user


class Hidden(collections.deque[Any]):
    """A container whose members are not in its ``__dict__``."""


def test_a_registered_class_is_opened_as_it_says() -> None:
    register_container(Hidden, lambda queue: (list(queue), queue.maxlen), lambda members, most: Hidden(members, most))
    mine = capture(lambda queue: Hidden([queue[0] * 2, queue[1]], queue.maxlen))
    for n in range(6):
        got = mine(Hidden([x_of(n), 3], 5))
        assert type(got) is Hidden
        assert (bits(got[0]), got[1], got.maxlen) == (bits(x_of(n) * 2), 3, 5)
    assert recordings(mine).replays == 4 - AGAIN


def test_objects_in_static_stay_whole() -> None:
    """The same object in many calls: a recording is bound to it, and reads its tensor where it is."""

    def body(x: Tensor, pair: Any) -> Any:
        pair.a.add_(x)
        return pair.a * pair.scale

    mine = capture(body, static=["pair"])
    pair, twin = Pair(x_of(1), 0), Pair(x_of(1), 0)
    for n in range(8):
        pair.scale = twin.scale = float(n // 4 + 1)
        assert bits(mine(x_of(n), pair)) == bits(body(x_of(n), twin))
    assert recordings(mine).replays >= 4


def test_gradients_through_objects() -> None:
    torch.set_grad_enabled(True)
    weight, twin = (nn.Parameter(x_of(3)) for _ in range(2))

    def body(p: Any, weight: Tensor) -> Any:
        return types.SimpleNamespace(loss=(p.a * weight).sum(), y=p.a + weight)

    mine = capture(body)
    for n in range(6):
        got, expected = mine(Pair(x_of(n), 1), weight), body(Pair(x_of(n), 1), twin)
        (got.loss + got.y.sum()).backward()
        (expected.loss + expected.y.sum()).backward()
        assert bits(weight.grad) == bits(twin.grad)
    assert recordings(mine).replays >= 3


def test_copies_of_an_object_are_calls_like_it() -> None:
    mine, pair = capture(lambda p: p.a * 2), Pair(x_of(1), x_of(2))
    for _ in range(6):
        pair = copy.deepcopy(pair)
        assert bits(mine(pair)) == bits(pair.a * 2)
    assert recordings(mine).recordings == 1


def test_objects_that_show_no_dict_are_asked_for_none() -> None:
    """Type variables of Python 3.12 have one that ``vars`` does not find."""

    class Kept:
        def __init__(self) -> None:
            self.total = torch.zeros(2)

    kept = Kept()
    values = [TypeVar("T"), classmethod(print), 1.0, kept]
    assert objects.find_state(values, {id(kept.total.untyped_storage())}) == [Kept.__qualname__]
    assert objects.has_state(Kept)
