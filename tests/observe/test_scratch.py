"""Storages that a body fills and empties, as sharding does with gathered parameters; operators that write what their
schemas do not name; containers filled and replaced within a body."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, config, mark_step_begin, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE
from tests.support.writes import bits, x_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False, poison=True):
        yield


class Gatherer:
    """``whole`` (4 x 4) has memory only while it is used; ``shard`` (2 x 4) is what stays."""

    def __init__(self) -> None:
        self.shard = x_of(1, 2, 4)
        self.whole = torch.empty(4, 4)
        self.events: dict[str, object] = {}
        self.whole.untyped_storage().resize_(0)

    def fill(self) -> Tensor:
        self.whole.untyped_storage().resize_(64)
        self.whole[:2].copy_(self.shard)
        self.whole[2:].copy_(self.shard * 2)
        return self.whole

    def empty(self) -> None:
        self.whole.untyped_storage().resize_(0)


def gathers(g: Gatherer, x: Tensor) -> Tensor:
    y = torch.tanh(x @ g.fill())
    g.empty()
    y = y + x.sum()  # may lie where the gathered one was
    g.whole.untyped_storage().resize_(64)
    torch.mul(y[:4], 3, out=g.whole)
    y = y + g.whole.sum(0)
    g.whole.add_(y[:4]).mul_(2)
    z = g.whole + 1
    g.shard.mul_(0.5)
    g.empty()
    return z * 2 + y


def keeps_it_filled(g: Gatherer, x: Tensor) -> Tensor:
    return x @ g.fill()


def grows_it(g: Gatherer, x: Tensor) -> Tensor:
    storage = g.shard.untyped_storage()
    storage.resize_(storage.nbytes() * 2)
    return x @ g.shard.T


def empties_what_it_made(g: Gatherer, x: Tensor) -> Tensor:
    y = x @ g.shard.T
    z = y * 2
    y.untyped_storage().resize_(0)
    return z + 1


def sets_up(g: Gatherer, x: Tensor) -> Tensor:
    if "whole" in vars(g) and g.whole.shape == (4, 4):
        g.whole = torch.empty(16)  # made by the first call, empty from then on
    else:
        g.whole.untyped_storage().resize_(64)
    g.whole.fill_(2.0)
    y = x * g.whole[:4]
    g.whole.untyped_storage().resize_(0)
    return y


Body = Callable[[Gatherer, Tensor], Tensor]


def compared(body: Body, times: int = 7) -> tuple[Any, list[str]]:
    """Captured calls against eager ones on a twin; gives the captured function and the warnings' codes."""
    captured, mine, theirs = capture(body, static=["g"]), Gatherer(), Gatherer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        for seed in range(times):
            mark_step_begin()
            assert bits(captured(mine, x_of(seed, 4, 4))) == bits(body(theirs, x_of(seed, 4, 4))), seed
            assert mine.whole.untyped_storage().nbytes() == theirs.whole.untyped_storage().nbytes()
            assert bits(mine.shard) == bits(theirs.shard)
    return captured, [str(warning.message)[:5] for warning in caught]


@pytest.mark.parametrize("body", [gathers, sets_up])
def test_empty_storages_are_filled_and_emptied(body: Body) -> None:
    """Nothing holds such memory between calls, so nobody needs to own it."""
    captured, codes = compared(body)
    assert recordings(captured).replays >= 3, recordings(captured)
    assert codes == []


def test_two_that_take_turns_share_memory() -> None:
    mine, theirs = [Gatherer(), Gatherer()], [Gatherer(), Gatherer()]
    mine[1].shard, theirs[1].shard = x_of(2, 2, 4), x_of(2, 2, 4)
    captured = capture(gathers, static=["g"])
    for seed in range(10):
        mark_step_begin()
        for gatherer, twin in zip(mine, theirs, strict=True):
            assert bits(captured(gatherer, x_of(seed, 4, 4))) == bits(gathers(twin, x_of(seed, 4, 4))), seed
    assert recordings(captured).replays >= 8


@pytest.mark.parametrize("body", [keeps_it_filled, grows_it])
def test_storages_that_stay_otherwise(body: Body) -> None:
    """Memory that a call leaves behind is no scratch: eager, with the reason."""
    captured, codes = compared(body, 4)
    assert recordings(captured).replays == 0
    assert codes
    assert set(codes) <= {"CG202", "CG904", "CG105"}


def test_memory_of_its_own_is_given_up() -> None:
    captured, codes = compared(empties_what_it_made)
    assert recordings(captured).replays >= 3 if DEVICE.type == "cuda" else "CG202" in codes


def test_a_body_that_raises_half_way_leaves_what_eager_leaves() -> None:
    class Oops(Exception):
        pass

    def body(g: Gatherer, x: Tensor, raises: bool) -> Tensor:
        y = x @ g.fill()
        if raises:
            raise Oops
        g.empty()
        return y

    captured, g = capture(body, static=["g"]), Gatherer()
    for number in range(6):
        with pytest.raises(Oops):
            captured(g, x_of(number, 4, 4), True)
        assert g.whole.untyped_storage().nbytes() == 64
        assert bits(g.whole[:2]) == bits(g.shard)
        g.empty()
        assert bits(captured(g, x_of(number, 4, 4), False)) == bits(body(g, x_of(number, 4, 4), False))


@torch.library.custom_op("capture_tests::fills_quietly", mutates_args=())
def _fills_quietly(target: Tensor, source: Tensor) -> None:
    target.copy_(source * 3)  # its schema, "(Tensor, Tensor) -> ()", does not say so


def test_operators_that_write_what_they_do_not_name() -> None:
    """Such operators run again in every replay; ``fully_shard`` copies parameters with one."""

    def body(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.ops.capture_tests.fills_quietly(y, x)
        return y + 1

    captured = capture(body)
    for seed in range(6):
        assert bits(captured(x_of(seed))) == bits(body(x_of(seed)))
    assert recordings(captured).replays >= 3


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_containers_that_are_filled_and_replaced(kind: str) -> None:
    """An equal one stands in its place afterwards: nothing changed for whoever looks."""
    g = Gatherer()
    seen: Any = g

    def body(x: Tensor) -> Tensor:
        if kind == "dict":
            seen.events["last"] = object()
            seen.events = {}
        else:
            seen.events.append(object())
            seen.events = []
        return x * 2

    seen.events = {} if kind == "dict" else []
    captured = capture(body)
    for seed in range(6):
        assert bits(captured(x_of(seed))) == bits(x_of(seed) * 2)
        assert not seen.events
    assert recordings(captured).replays >= 3
    seen.events = {"old": 1} if kind == "dict" else [1]
    captured = capture(body)  # now they differ after the first call, and no more from then on
    for seed in range(6):
        assert bits(captured(x_of(seed))) == bits(x_of(seed) * 2)
        assert not seen.events
