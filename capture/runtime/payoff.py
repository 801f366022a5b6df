"""Payoff: whether replays of a recording are faster than its body.

They are not where the body is short, or where a replay goes through Python. After ``AFTER`` replays ``SAMPLES`` calls
run the body in their place, and medians are compared, so that one call that waited for something else decides nothing.
A fast path serves so many replays, and is closed until the body was measured.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Protocol

from attrs import define, field

AFTER = 32
"""Replays before the body is measured."""
SAMPLES = 7
_SHARE, _LEAST = 0.05, 5e-6  # a replay may take this much more than the body, or so many seconds

clock = time.perf_counter
"""Seconds."""


class TimedPath(Protocol):
    """A fast path."""

    left: int
    """Replays until it is closed, all of which are timed; -1: it is open, and one of many is."""

    def times(self) -> list[tuple[int, int]]:
        """Begin and length of the last ones that were timed, in nanoseconds."""


@define(eq=False)
class Payoff:
    """Of one entry."""

    replays: deque[float] = field(factory=lambda: deque(maxlen=SAMPLES))
    bodies: list[float] = field(factory=list)
    paths: list[tuple[TimedPath, int]] = field(factory=list)
    """Fast paths on trial, and how many replays each may serve."""
    _noted: int = 0

    @property
    def number(self) -> int:
        """Of replays."""
        return self._noted + sum(most - path.left for path, most in self.paths)

    @property
    def is_open(self) -> bool:
        """More is to be measured."""
        return len(self.bodies) < SAMPLES

    @property
    def wants_body(self) -> bool:
        """This call is to run the body: as the next ones, so that its code is at hand as in a loop without replays."""
        return self.is_open and self.number >= AFTER

    def try_out(self, path: TimedPath) -> None:
        """Time what this fast path replays, until there is enough."""
        path.left = max(AFTER - self.number, 1)
        self.paths.append((path, path.left))

    def note_replay(self, seconds: float) -> None:
        """A replay took this long."""
        self._noted += 1
        if self.is_open:
            self.replays.append(seconds)

    def note_body(self, seconds: float) -> None:
        """A run of the body did. With the last one the fast paths are open again."""
        self.bodies.append(seconds)
        if self.is_open:
            return
        for path, _ in self.paths:
            self.replays.extend(nanoseconds * 1e-9 for _, nanoseconds in path.times())
            path.left = -1
        self.paths.clear()

    @property
    def loss(self) -> float:
        """Seconds that a replay takes longer than the body by more than is allowed; 0 where that is not known."""
        if self.is_open or len(self.replays) < SAMPLES:
            return 0.0
        body, replay = statistics.median(self.bodies), statistics.median(self.replays)
        return replay - body if replay > body + max(_SHARE * body, _LEAST) else 0.0
