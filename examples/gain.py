"""What an example gained: eager and captured calls in turn, as one line of text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def gain(eager: Callable[[], object], captured: Callable[[], object], calls: int = 50, rounds: int = 7) -> str:
    """A line with both medians in microseconds a call, and their ratio. Each side is warmed up by a few calls."""
    for _ in range(4):
        eager()
        captured()
    times = [(_time(eager, calls), _time(captured, calls)) for _ in range(rounds)]
    before, after = (statistics.median(side) for side in zip(*times, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in times)
    return f"gained: eager {before:.1f} us, captured {after:.1f} us a call, {ratio:.1f} times as fast"


def _time(function: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls * 1e6
