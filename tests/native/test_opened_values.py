"""Containers that C opens: calls take the fast path where the key is the same one, and never where it is another."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from capture.key import objects
from capture.key.pytree import leaves as leaves_in
from capture.key.signature import Leaves, key_of
from tests.support.device import AGAIN, DEVICE
from tests.support.fast_paths import fresh as fresh
from tests.support.fast_paths import goes_straight


@dataclasses.dataclass
class Batch:
    x: Any
    size: int
    note: str = "none"


class Point(NamedTuple):
    x: Any
    size: int


class Slotted:
    __slots__ = ("size", "x")

    def __init__(self, x: Any, size: int, *, partly: bool = False) -> None:
        self.x = x
        if not partly:
            self.size = size


class Encoding(collections.UserDict[str, Any]):
    """A mapping like ``transformers.BatchEncoding``."""


class Output(collections.OrderedDict[str, Any]):
    """A dict with attributes, like ``transformers.utils.ModelOutput``."""


def tensor() -> Tensor:
    return torch.randn(3, device=DEVICE)


def output() -> Any:
    found = Output(x=tensor(), size=2)
    found.extra = 1  # type: ignore[attr-defined]
    return found


MAKE: dict[str, Callable[[], Any]] = {
    "list": lambda: [tensor(), 2],
    "tuple": lambda: (tensor(), 2),
    "dict": lambda: {"x": tensor(), "size": 2},
    "defaultdict": lambda: collections.defaultdict(list, x=[tensor(), tensor()]),
    "namedtuple": lambda: Point(tensor(), 2),
    "dataclass": lambda: Batch(tensor(), 2),
    "namespace": lambda: types.SimpleNamespace(x=tensor(), size=2),
    "slots": lambda: Slotted(tensor(), 2),
    "UserDict": lambda: Encoding(x=tensor(), size=2),
    "dict with attributes": output,
    "nested": lambda: [{"a": Batch([tensor(), None], 1)}, types.SimpleNamespace(b=(Slotted(tensor(), 1), 2.0))],
}
OTHERS: dict[str, list[Callable[[], Any]]] = {
    "list": [lambda: [tensor(), 3], lambda: [tensor()], lambda: (tensor(), 2), lambda: [tensor(), True]],
    "tuple": [lambda: (tensor(), 2.0), lambda: [tensor(), 2], lambda: Point(tensor(), 2)],
    "dict": [
        lambda: {"size": 2, "x": tensor()}, lambda: {"x": tensor(), "size": 2, "y": 1},
        lambda: {"x": tensor(), "Size": 2},
        lambda: {"x": tensor().double(), "size": 2}, lambda: collections.OrderedDict(x=tensor(), size=2),
    ],
    "defaultdict": [lambda: {"x": [tensor(), tensor()]}, lambda: collections.defaultdict(list, x=[tensor()])],
    "namedtuple": [lambda: (tensor(), 2), lambda: Point(tensor(), 3)],
    "dataclass": [lambda: Batch(tensor(), 3), lambda: Batch(tensor(), 2, "other"), lambda: Batch(tensor(), True)],
    "namespace": [lambda: types.SimpleNamespace(size=2, x=tensor()), lambda: types.SimpleNamespace(x=tensor())],
    "slots": [lambda: Slotted(tensor(), 3), lambda: Slotted(tensor(), 2, partly=True)],
    "UserDict": [lambda: Encoding(x=tensor()), lambda: collections.UserDict(x=tensor(), size=2)],
    "dict with attributes": [lambda: Output(x=tensor(), size=2)],
    "nested": [lambda: [{"a": Batch([tensor(), None], 1)}, types.SimpleNamespace(b=(Slotted(tensor(), 2), 2.0))]],
}  # fmt: skip


def body(value: Any) -> Any:
    """Uses all that is in it, and which kind of container it is."""
    plain = [(path, leaf) for path, leaf in leaves_in(value) if not isinstance(leaf, Tensor)]
    total = sum(leaf.sum() for _, leaf in leaves_in(value) if isinstance(leaf, Tensor))
    return total * (1 + len(plain)), type(value).__name__, repr(plain)


@pytest.fixture(autouse=True)
def opened() -> None:
    objects.opened.update({types.SimpleNamespace, Slotted, Encoding, Output, collections.UserDict})


def same(result: Any, expected: Any) -> bool:
    return torch.equal(result[0].double(), expected[0].double()) and result[1:] == expected[1:]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MAKE)
def test_calls_with_containers_go_straight(name: str) -> None:
    run = capture(body)
    for _ in range(4):
        value = MAKE[name]()
        assert same(run(value), body(value))
    assert goes_straight(run, MAKE[name]())
    replays = recordings(run).replays
    for _ in range(3):
        value = MAKE[name]()
        assert same(run(value), body(value))
    assert recordings(run).replays == replays + 3
    for make_other in OTHERS[name]:
        value = make_other()
        assert not goes_straight(run, value)
        assert same(run(value), body(value))
    assert goes_straight(run, MAKE[name]())


def test_by_keyword_and_among_plain_values() -> None:
    run = capture(lambda x, *more, scale=1.0, **rest: x * scale + more[0]["y"] + rest["z"][0])
    x = tensor()
    for number in range(6):
        y, z = tensor(), tensor()
        result = run(x, {"y": y}, scale=2.0, z=[z])
        assert torch.equal(result, x * 2.0 + y + z), number
    assert recordings(run).replays == 4 - AGAIN


def test_an_object_that_is_met_twice() -> None:
    run = capture(lambda a, b: (a.x + b.x, a is b))
    for _ in range(4):
        run(Batch(tensor(), 2), Batch(tensor(), 2))
    assert goes_straight(run, Batch(tensor(), 2), Batch(tensor(), 2))
    batch = Batch(tensor(), 2)
    assert not goes_straight(run, batch, batch)
    assert run(batch, batch)[1] is True
    empty = Batch(None, 2)  # without tensors, whose memory would tell
    fixed = capture(lambda x, a, b: (x * 2, a is b))
    for _ in range(4):
        fixed(tensor(), Batch(None, 2), Batch(None, 2))
    assert fixed(tensor(), empty, empty)[1] is True


def test_containers_that_the_body_writes() -> None:
    def write(features: dict[str, Any]) -> Tensor:
        features["y"] = features["x"] * 2
        return features["y"] + 1  # type: ignore[no-any-return]

    run = capture(write)
    for _ in range(6):
        x = tensor()
        mine, theirs = {"x": x}, {"x": x}
        assert torch.equal(run(mine), write(theirs))
        assert list(mine) == list(theirs)
        assert torch.equal(mine["y"], theirs["y"])
    assert recordings(run).replays >= 3


def test_tensors_in_containers_that_share_memory() -> None:
    def step(pair: list[Tensor]) -> Tensor:
        pair[0].add_(1)
        return pair[1] * 2

    run = capture(step)
    for number in range(12):
        base = torch.zeros(6, device=DEVICE)
        mine = [base[:4], base[2:]] if number % 3 == 2 else [base[:3], base[3:]]
        theirs = base.clone()
        their_pair = [theirs[:4], theirs[2:]] if number % 3 == 2 else [theirs[:3], theirs[3:]]
        assert torch.equal(run(mine), step(their_pair)), number
        assert torch.equal(base, theirs), number


def _random_value(source: random.Random, depth: int) -> Any:
    kind = source.randrange(9 if depth else 3)
    if kind == 0:
        return tensor()
    if kind < 3:
        return source.choice([1, 2, 1.0, True, None, "a", torch.float32, b"x"])
    members = [_random_value(source, depth - 1) for _ in range(source.randrange(1, 3))]
    names = source.sample(["a", "b", "c"], len(members))
    if kind == 3:
        return members
    if kind == 4:
        return tuple(members)
    if kind == 5:
        return dict(zip(names, members, strict=True))
    if kind == 6:
        return types.SimpleNamespace(**dict(zip(names, members, strict=True)))
    if kind == 7:
        return Batch(members[0], 1)
    return Slotted(members[0], 1, partly=source.random() < 0.3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(3))
def test_straight_exactly_where_the_key_is_the_same(part: int) -> None:
    """Random pairs of structures, many of them nearly the same."""
    straight = 0
    for seed in range(part * 50, part * 50 + 50):
        run = capture(lambda value, x: x * 2)
        first = _random_value(random.Random(seed), 2)
        for _ in range(3):
            run(_random_value(random.Random(seed), 2), tensor())
        for number in (seed, *range(seed * 7, seed * 7 + 6)):
            second = _random_value(random.Random(number), 2)
            is_same = key_of(first, Leaves()) == key_of(second, Leaves())
            assert goes_straight(run, second, tensor()) == is_same, (seed, number, first, second)
            straight += is_same
    assert straight >= 50
