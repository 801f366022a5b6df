"""Payoff: whether replays of a recording that go through Python are faster than its body.

A recording that C replays is. One in segments goes through Python at each value that the host reads, and may be slower
than a small body. After ``AFTER`` replays ``SAMPLES`` calls run the body in their place, and medians are compared, so
that one call that waited for something else decides nothing.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from attrs import define, field

AFTER = 32
"""Replays before the body is measured."""
SAMPLES = 7
_SHARE, _LEAST = 0.05, 5e-6  # a replay may take this much more than the body, or so many seconds

clock = time.perf_counter
"""Seconds."""


@define(eq=False)
class Payoff:
    """Of one entry."""

    replays: deque[float] = field(factory=lambda: deque(maxlen=SAMPLES))
    bodies: list[float] = field(factory=list)
    number: int = 0
    """Of replays."""

    @property
    def is_open(self) -> bool:
        """More is to be measured."""
        return len(self.bodies) < SAMPLES

    @property
    def wants_body(self) -> bool:
        """This call is to run the body: as the next ones, so that its code is at hand as in a loop without replays."""
        return self.number >= AFTER and self.is_open

    def note_replay(self, seconds: float) -> None:
        """A replay took this long."""
        self.number += 1
        if self.is_open:
            self.replays.append(seconds)

    def note_body(self, seconds: float) -> None:
        """A run of the body did."""
        self.bodies.append(seconds)

    @property
    def loss(self) -> float:
        """Seconds that a replay takes longer than the body by more than is allowed; 0 where that is not known."""
        if self.is_open or len(self.replays) < SAMPLES:
            return 0.0
        body, replay = statistics.median(self.bodies), statistics.median(self.replays)
        return replay - body if replay > body + max(_SHARE * body, _LEAST) else 0.0
