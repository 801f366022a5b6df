"""Containers as arguments and results: one whose parts are known is opened, any other is told apart by identity."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, recordings
from tests.support.device import AGAIN
from tests.support.keys import A, bits, check_same, x_of
from tests.support.keys import fresh as fresh


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclasses.dataclass
class Cache:
    key: Tensor
    scale: float = 2.0
    more: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenCache:
    key: Tensor
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class SlottedCache:
    key: Tensor
    scale: float = 2.0


@attrs.define
class AttrsCache:
    key: Tensor
    scale: float = 2.0


@attrs.frozen
class FrozenAttrsCache:
    key: Tensor
    scale: float = 2.0


CACHES = [Cache, FrozenCache, SlottedCache, AttrsCache, FrozenAttrsCache]


def add_cache(x: Tensor, cache: Any) -> Tensor:
    result: Tensor = x * cache.scale + cache.key
    return result


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", CACHES)
def test_tensors_in_classes_with_fields_are_inputs(kind: type[Any]) -> None:
    """A plain dataclass is a leaf to torch's pytree; the tensors in it are found all the same."""
    captured = capture(add_cache)
    for seed in range(6):
        check_same(captured, add_cache, A, kind(x_of(seed)), times=1)
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)
    check_same(captured, add_cache, A, kind(x_of(1), scale=3.0))
    assert recordings(captured).observations == 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", CACHES)
def test_tensors_in_classes_with_fields_are_outputs(kind: type[Any]) -> None:
    def make(x: Tensor) -> Any:
        return kind(torch.relu(x) + 1, scale=4.0)

    captured = capture(make)
    for seed in range(5):
        got = captured(x_of(seed))
        assert type(got) is kind
        assert got.scale == 4.0
        assert bits(got.key) == bits(make(x_of(seed)).key)
    assert recordings(captured).recordings == 1 + AGAIN


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", CACHES)
def test_static_names_reach_into_fields(kind: type[Any]) -> None:
    captured = capture(add_cache, static=["cache.key"])
    cache = kind(x_of(1))
    for _ in range(4):
        cache.key.add_(1)
        check_same(captured, add_cache, A, cache, times=1)
    assert recordings(captured).recordings == 1


NESTS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: [a, b],
    lambda a, b: (a, (b,)),
    lambda a, b: {"x": a, "y": [b, {"z": a * 2}]},
    lambda a, b: Pair(a, Pair(b, 3)),
    lambda a, b: Cache(a, 3.0, more=[b, {"k": FrozenCache(a * 2)}]),
    lambda a, b: collections.OrderedDict(p=a, q=b),
    lambda a, b: collections.defaultdict(list, p=[a, b]),
    lambda a, b: AttrsCache(a, scale=Pair(b, None)),  # type: ignore[arg-type]
    lambda a, b: {1: a, 2: b},
    lambda a, b: ([], {}, (), [a], b),
]


def total(nest: Any) -> Tensor:
    """One tensor made of all tensors and numbers in a nest; it depends on their order, too."""
    if isinstance(nest, Tensor):
        return nest
    if isinstance(nest, (int, float)):
        return torch.full((3, 4), float(nest))
    if nest is None:
        return torch.zeros(3, 4)
    if isinstance(nest, dict):
        members = list(nest.values())
    elif isinstance(nest, (list, tuple)):
        members = list(nest)
    elif dataclasses.is_dataclass(nest):
        members = [getattr(nest, field.name) for field in dataclasses.fields(nest)]
    else:
        members = [getattr(nest, field.name) for field in attrs.fields(type(nest))]
    result = torch.zeros(3, 4)
    for index, member in enumerate(members):
        result = result * 2 + total(member) * (index + 1)
    return result


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", NESTS, ids=range(len(NESTS)))
def test_nested_containers_are_opened(make: Callable[[Tensor, Tensor], Any]) -> None:
    captured = capture(total)
    for seed in range(5):
        check_same(captured, total, make(x_of(seed), x_of(seed + 10)), times=1)
    assert (recordings(captured).observations, recordings(captured).recordings) == (1, 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", NESTS, ids=range(len(NESTS)))
def test_nested_containers_come_back(make: Callable[[Tensor, Tensor], Any]) -> None:
    def produce(x: Tensor) -> Any:
        return make(torch.relu(x), torch.tanh(x))

    captured = capture(produce)
    for seed in range(5):
        got, expected = captured(x_of(seed)), produce(x_of(seed))
        assert type(got) is type(expected)
        assert bits(total(got)) == bits(total(expected))
        if isinstance(got, dict):
            assert list(got) == list(expected)
    assert recordings(captured).recordings == 1 + AGAIN


def test_an_output_container_is_new_on_every_call() -> None:
    captured = capture(lambda x: {"y": [torch.relu(x)]})
    got = [captured(A) for _ in range(5)]
    for result in got:
        result["y"].append(A)
        result["z"] = []
    again = captured(A)
    assert list(again) == ["y"]
    assert len(again["y"]) == 1


def test_the_caller_s_containers_stay_the_caller_s() -> None:
    def first(x: Tensor, cache: dict[str, list[Tensor]]) -> Any:
        return torch.relu(x), cache, cache["k"]

    captured = capture(first)
    for _ in range(5):
        cache = {"k": [x_of(3)]}
        _, given_back, inner = captured(A, cache)
        assert given_back["k"][0] is cache["k"][0]
        assert inner[0] is cache["k"][0]


class Opaque(Exception):
    """Holds a tensor and can neither be opened nor compared by value."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def test_an_opaque_container_with_tensors_is_a_finding() -> None:
    def use(x: Tensor, box: Any) -> Any:
        return x * box.weight

    captured = capture(use)
    with pytest.warns(CaptureWarning, match="CG106"):
        check_same(captured, use, A, Opaque(x_of(1)), times=1)
    for seed in range(4):
        box = Opaque(x_of(seed))
        for _ in range(3):
            check_same(captured, use, A, box, times=1)
    assert recordings(captured).recordings == 0


def test_an_opaque_output_with_tensors_is_a_finding() -> None:
    captured = capture(lambda x: Opaque(torch.relu(x)))
    with pytest.warns(CaptureWarning, match="CG106"):
        assert bits(captured(A).weight) == bits(torch.relu(A))
    kept = [captured(x_of(seed)) for seed in range(4)]
    assert [bits(one.weight) for one in kept] == [bits(torch.relu(x_of(seed))) for seed in range(4)]


class Kept:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def test_an_opaque_argument_that_is_handed_back() -> None:
    """A cache that is passed in, written and returned, as models of ``transformers`` do: the caller's own object."""

    def step(x: Tensor, cache: Kept) -> tuple[Tensor, Kept]:
        cache.weight.add_(x)
        return cache.weight * 2, cache

    captured = capture(step, static=["cache"])
    cache, twin = Kept(torch.zeros(3, 4)), Kept(torch.zeros(3, 4))
    for seed in range(6):
        y, same_cache = captured(x_of(seed), cache)
        expected, _ = step(x_of(seed), twin)
        assert bits(y) == bits(expected)
        assert same_cache is cache
        assert bits(cache.weight) == bits(twin.weight)
    assert recordings(captured).replays == 4 - AGAIN
    reference = weakref.ref(cache)
    del cache, same_cache
    gc.collect()
    assert reference() is None


def test_an_opaque_object_without_tensors_is_known_by_identity() -> None:
    class Settings:
        def __init__(self, scale: float) -> None:
            self.scale = scale

    captured = capture(lambda x, settings: x * settings.scale + 1)
    for settings in (Settings(2.0), Settings(3.0)):
        check_same(captured, lambda x, settings: x * settings.scale + 1, A, settings)


def test_an_attribute_of_an_opaque_argument_that_changes() -> None:
    """The body's own code names ``settings.scale``; an old value is never used."""

    class Settings:
        scale = 2.0

    def use(x: Tensor, settings: Settings) -> Tensor:
        return x * settings.scale + 1

    captured, settings = capture(use), Settings()
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        settings.scale = scale
        check_same(captured, use, A, settings, times=1)


def test_a_module_argument_s_attribute_that_changes() -> None:
    class Net(nn.Module):
        scale = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

    def use(net: Net, x: Tensor) -> Tensor:
        result: Tensor = net.linear(x) * net.scale
        return result

    captured, net = capture(use), Net()
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0):
        net.scale = scale
        check_same(captured, use, net, A, times=1)
    net.linear.weight.mul_(2)
    check_same(captured, use, net, A)
    net.linear = nn.Linear(4, 4)
    check_same(captured, use, net, A)


def test_a_tuple_that_does_not_say_how_long_it_is() -> None:
    """Its ``__len__`` raises, as that of e3nn's irreducible representations does."""

    class Odd(tuple[int, ...]):
        __slots__ = ()

        @override
        def __len__(self) -> int:
            raise NotImplementedError

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd((1, 2))

        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net = Net()
    mine = capture(net.forward)
    for seed in range(4):
        assert bits(mine(x_of(seed))) == bits(x_of(seed) * 2)
    assert recordings(mine).replays == 2


class OwnDict(dict[Any, Any]):
    """A dict of a user's class."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, OwnDict, lambda d: [d], lambda d: OwnDict(more=d)])
@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ((1, 2), (True, 2)), (1, 1 + 0j)], ids=str
)  # fmt: skip
def test_keys_of_dicts_that_are_equal_and_no_twins(kind: Callable[[Any], Any], one: Any, other: Any) -> None:
    def body(held: Any) -> Tensor:
        while isinstance(held, list) or "more" in held:
            held = held[0] if isinstance(held, list) else held["more"]
        ((name, x),) = held.items()
        result: Tensor = x * len(repr(name))
        return result

    mine = capture(body)
    for number in range(10):
        name = other if number in (6, 8) else one
        assert bits(mine(kind({name: x_of(number)}))) == bits(body(kind({name: x_of(number)})))
    assert recordings(mine).replays >= 3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: [s], lambda s: {"more": s}])
@pytest.mark.parametrize(("one", "other"), [({1}, {True}), ({0.0}, {-0.0}), ({(1,)}, {(1.0,)}), ({0, 8}, {8, 0})])
def test_sets_that_are_equal_and_no_twins(wrap: Callable[[Any], Any], one: Any, other: Any) -> None:
    """The last two are met in another order."""

    def body(held: Any, x: Tensor) -> Tensor:
        found = held if isinstance(held, set) else held[0] if isinstance(held, list) else held["more"]
        return x + sum([ord(letter) * at for at, letter in enumerate(repr(list(found)))])

    mine = capture(body)
    for number in range(10):
        held = (other if number in (6, 8) else one).copy()
        assert bits(mine(wrap(held), x_of(number))) == bits(body(wrap(held), x_of(number)))
    assert recordings(mine).replays >= 3


@pytest.mark.filterwarnings("ignore:CG106")
@pytest.mark.parametrize("kind", [set, dict.fromkeys])
def test_tensors_as_members_of_sets_and_keys_of_dicts(kind: Callable[[Any], Any]) -> None:
    """They are other objects, and are not compared by their values."""
    tensors = [x_of(number) for number in range(2)]
    mine = capture(lambda held, x: x * (2 if tensors[0] in held else 3))
    for number in range(12):
        held = kind([tensors[1 if number in (8, 10) else 0]])
        assert bits(mine(held, x_of(number))) == bits(x_of(number) * (3 if number in (8, 10) else 2))
