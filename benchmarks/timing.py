"""Timing of two sides in turn in one process, so that a slow moment of the machine affects both.

A round times each side in a few short slices, in turn, and keeps each side's fastest slice. A figure is the median over
rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from attrs import frozen

Side = Callable[[], object]


@frozen(kw_only=True)
class Effort:
    """How much to measure: ``rounds`` of ``slices`` that take about ``slice_ms`` each."""

    rounds: int = 9
    slices: int = 24
    slice_ms: float = 3.0


QUICK = Effort(rounds=2, slices=1, slice_ms=0.5)


@frozen(kw_only=True)
class Figure:
    """One measured number, lower is better, and the bar it has to stay below."""

    name: str
    unit: str
    values: tuple[float, ...]
    """One value for each round."""
    bar: float | None = None
    """The largest median that passes; None where the number is only information."""
    detail: str = ""

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        """The fastest round."""
        return min(self.values)

    @property
    def iqr(self) -> float:
        """The spread: third quartile minus first."""
        if len(self.values) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return third - first

    @property
    def passed(self) -> bool | None:
        """Whether the median is within the bar; None without a bar."""
        return None if self.bar is None else self.median <= self.bar


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection while timing."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def alternate(sides: Sequence[Side], effort: Effort) -> list[tuple[float, ...]]:
    """Microseconds a call of every side, one tuple a round."""
    counts = [_calls_in(side, effort.slice_ms) for side in sides]
    rounds = []
    with undisturbed():
        for number in range(effort.rounds):
            best = [float("inf")] * len(sides)
            order = range(len(sides)) if number % 2 == 0 else range(len(sides) - 1, -1, -1)
            for _ in range(effort.slices):
                for index in order:
                    best[index] = min(best[index], _slice_us(sides[index], counts[index]))
            rounds.append(tuple(best))
    return rounds


def _calls_in(side: Side, milliseconds: float) -> int:
    """The number of calls that take about this long. Counting them also warms the side up."""
    calls = 1
    while (taken := _slice_us(side, calls) * calls / 1e3) < milliseconds:
        calls = max(calls + 1, min(calls * 8, int(calls * 1.1 * milliseconds / max(taken, 1e-6))))
    return calls


def _slice_us(side: Side, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        side()
    return (time.perf_counter() - begin) * 1e6 / calls
