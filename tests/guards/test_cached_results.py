"""Tensors that ``functools.lru_cache`` keeps are state like any other, and slots that a property hides are none."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from capture.state.snapshot import roots, snapshot

CACHES = [functools.cache, functools.lru_cache, functools.lru_cache(maxsize=2), functools.lru_cache(maxsize=None)]


def _pair(cached: Any) -> tuple[Any, Any]:
    """The same function of a cached mask: eager, and captured."""

    def build(wrap: Any) -> Any:
        scale = [1.0]

        @cached  # type: ignore[untyped-decorator]
        def mask(size: int) -> Tensor:
            return torch.full((size, size), scale[0]).tril()

        @wrap  # type: ignore[untyped-decorator]
        def masked(x: Tensor) -> Any:
            return (x @ mask(x.shape[1])).relu() + 1

        masked.mask, masked.scale = mask, scale
        return masked

    return build(lambda function: function), build(capture)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("sizes", [(4,), (4, 5)])
def test_a_cached_tensor_is_read_by_replays(cached: Any, sizes: tuple[int, ...]) -> None:
    eager, ours = _pair(cached)
    for n in range(20):
        x = torch.randn(3, sizes[n % len(sizes)])
        assert torch.equal(ours(x), eager(x))
    assert recordings(ours).replays >= 8


@pytest.mark.one_in(4)
@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("how", ["cleared", "cleared and filled", "written in place"])
def test_a_cache_that_keeps_other_results(cached: Any, how: str) -> None:
    eager, ours = _pair(cached)
    x = torch.randn(3, 4)
    for n in range(24):
        if n % 8 == 7:
            for side in (eager, ours):
                if how == "written in place":
                    side.mask(4).add_(1)
                    continue
                side.scale[0] += 1
                side.mask.cache_clear()
                if how == "cleared and filled":
                    side.mask(4)
        assert torch.equal(ours(x), eager(x)), n
    assert recordings(ours).replays >= 4


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_a_cache_that_drops_what_it_kept() -> None:
    eager, ours = _pair(functools.lru_cache(maxsize=1))
    for n in range(24):
        for one in (eager, ours):
            one.scale[0] = float(n)
            if n % 6 == 5:
                one.mask(9)  # takes the only place
        assert torch.equal(ours(torch.ones(3, 4)), eager(torch.ones(3, 4))), n


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_results_of_a_large_cache_are_not_looked_at() -> None:
    eager, ours = _pair(functools.lru_cache(maxsize=500))
    for one in (eager, ours):
        for size in range(200):
            one.mask(size)
    for _ in range(8):
        x = torch.randn(3, 4)
        assert torch.equal(ours(x), eager(x))


class _Number:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = (2.0, [1])


class _Computed(_Number):
    """Computes what objects of its base class keep."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 3.0

    value = property(lambda self: (self.times, [1]))


def test_a_property_in_the_place_of_a_slot_is_not_state() -> None:
    numbers: list[Any] = [_Number(), _Computed()]

    @capture
    def scaled(x: Tensor) -> Any:
        return x * numbers[0].value[0] + numbers[1].value[0]

    x = torch.randn(3)
    for n in range(12):
        numbers[1].times = 4.0 if n > 6 else 3.0
        assert torch.equal(scaled(x), x * 2.0 + numbers[1].times)
    assert recordings(scaled).replays >= 4
    state = snapshot(roots(None, None, {"numbers": numbers}))
    assert "numbers.0.value" in state.sources
    assert "numbers.1.value" not in state.sources
    assert "numbers.1.times" in state.sources


def _function(number: int) -> Any:
    def counted() -> int:
        return number

    return counted


def _seconds(count: int) -> float:
    """What it takes to look at so many functions, at best."""
    functions = [[_function(n) for n in range(50)] for _ in range(count // 50)]
    taken = []
    for _ in range(2):
        begin = time.thread_time()
        state = snapshot(roots(None, None, {"functions": functions}))
        taken.append(time.thread_time() - begin)
    assert len(state.namespaces) > count
    return min(taken)


def test_the_walk_takes_as_long_as_there_are_functions() -> None:
    assert _seconds(8000) < 20 * _seconds(1000)
