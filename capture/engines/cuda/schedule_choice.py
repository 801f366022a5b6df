"""Which of two orders a graph runs by: both are timed on replays that are calls anyway, and the faster one stays.

Once a recording has been replayed often enough, its schedule is made. Then some replays run as recorded and some by the
data, in turn; each is a call's own, so nothing runs twice. The graph is one and the same: only its edges are set anew,
and it is instantiated once more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from attrs import field

from capture.core.data import define

Order = Literal["recorded", "by data"]
ROUNDS: tuple[Order, ...] = ("recorded", "by data", "recorded", "by data")
EACH = 5
"""Replays of a round that are timed, after one that is not: an order's first launch brings the graph to the device."""
_GAIN = 0.98  # the other order has to take at most this share of the recorded one's time


class Mark(Protocol):
    """A point in a stream; a CUDA event."""

    def record(self) -> object:
        """Set the point here."""

    def query(self) -> bool:
        """Whether the device has reached the point."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds up to another one."""


class Scheduled(Protocol):
    """The recording that is to be scheduled."""

    def plan_schedule(self) -> bool:
        """Plan another order than the recorded one. False if there is none."""

    def run_by(self, order: Order) -> None:
        """Replays from now on run in this order. Where that fails, as recorded."""

    def step(self, leaves: Sequence[Any]) -> None:
        """Replay."""

    def decide(self, order: Order, times: tuple[float, float] | None) -> None:
        """The choice is made; ``times`` are milliseconds as recorded and by data."""


@define(eq=False)
class ScheduleChoice:
    """Runs replays of one recording until the choice is made."""

    recording: Scheduled
    after: int
    """Replays before anything is tried."""
    mark: Callable[[], Mark]
    """Makes a mark."""
    _replays: int = 0
    _round: int = -1
    _in_round: int = 0
    _marks: list[tuple[Order, Mark, Mark]] = field(factory=list)
    is_over: bool = False

    def __call__(self, leaves: Sequence[Any]) -> None:
        """One replay."""
        self._replays += 1
        if self.is_over or self._replays <= self.after or not self._begins():
            self.recording.step(leaves)
            return
        self._in_round += 1
        if self._in_round == 1 or self._in_round > EACH + 1:
            self.recording.step(leaves)
            return
        begin, end = self.mark(), self.mark()
        begin.record()
        self.recording.step(leaves)
        end.record()
        self._marks.append((ROUNDS[self._round], begin, end))

    def end(self) -> None:
        """Stop here: replays run as recorded."""
        if not self.is_over:
            self._decide("recorded", None)

    def _begins(self) -> bool:
        """Whether a replay of a round follows. Turns to the next round where this one is over."""
        if self._round < 0:
            if not self.recording.plan_schedule():
                self._decide("recorded", None)
                return False
            self._round = 0
        if self._in_round <= EACH:
            return True
        if not self._marks[-1][2].query():  # the device is behind: do not wait for it
            return True
        if self._round + 1 == len(ROUNDS):
            self._decide(*self._faster())
            return False
        self._round, self._in_round = self._round + 1, 0
        self.recording.run_by(ROUNDS[self._round])
        return not self.is_over

    def _faster(self) -> tuple[Order, tuple[float, float]]:
        taken: dict[Order, list[float]] = {"recorded": [], "by data": []}
        for order, begin, end in self._marks:
            taken[order].append(begin.elapsed_time(end))
        recorded, by_data = statistics.median(taken["recorded"]), statistics.median(taken["by data"])
        return "by data" if by_data <= _GAIN * recorded else "recorded", (recorded, by_data)

    def _decide(self, order: Order, times: tuple[float, float] | None) -> None:
        begun, self.is_over, self._marks = self._round >= 0, True, []
        if begun and (order == "recorded" or self._round < 1):
            self.recording.run_by(order)
        self.recording.decide(order, times)
