"""Payoff: whether replays of a recording are faster than its body.

They are not where the body is short, or where a replay goes through Python. After ``AFTER`` replays ``BODIES`` calls
run the body in their place, and of each the second shortest is compared. Where the two are close, both are measured
again in turn, up to ``ROUNDS`` rounds, and the longest of the shortest sixth is compared: caches, clock rates and other
programs change within a second, and where the times are close, measuring for longer costs little.
The calling thread does all work of the CPU engine, so there its **own time** counts: another program that has the
processor meanwhile changes nothing. Where a GPU works, the host waits for it, and the time of the clock counts.
There, replays are compared with the body only where they are in doubt: where one takes more of the host's time than the
body's operators can take at the least (``LAUNCH``). A graph is launched in a fraction of that, so most are never
compared, and no body needs memory beside the recording's.
A fast path serves so many replays, and then leads to the body until that was measured. Where one recording is in use,
and nothing follows on it, the bodies run with nothing before them (``Trial``): what a call goes through takes the code
of a small body out of the processor's caches, which makes it up to twice as slow as in a loop of its own.
Of forward and backward passes that are recorded apart the sums are compared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from attrs import field

from capture.core.data import define
from capture.guards.key_guards import SAME
from capture.key.signature import Leaf

AFTER = 12
"""Replays before the body is measured."""
SAMPLES = 5
"""So many timed replays are needed at least to compare."""
BODIES = 10
"""Runs of the body that are measured: Python runs code that is new for some eight times before it is at its fastest."""
ROUNDS = 3
"""How often replays and bodies are measured in turn, at most."""
CLEAR = 0.7, 1.3
"""Where a replay takes less than the first, or more than the second, times the body's time, one round is enough."""
LAUNCH = 2e-6
"""Seconds of the host that an operator of a device takes at least, with its launch (measured: 3 to 6 us)."""
_SHARE, _LEAST = 0.02, 5e-6  # a replay may take this share more than the body, or so many seconds
_AROUND = 3e-6  # seconds that a call takes besides its replay

clock = time.perf_counter
"""The wall clock, in seconds."""
own_time = time.thread_time
"""The seconds that this thread ran. A reading takes a microsecond, so it is for trials only."""


def clock_of(entry: Any) -> Callable[[], float]:
    """The clock that measures calls of this entry: the wall's for a GPU, the thread's own else."""
    return clock if entry.backend is None or entry.backend.has_own_memory else own_time


class TimedPath(Protocol):
    """A fast path."""

    left: int
    """Replays until it is closed, all of which are timed; -1: it is open, and one of many is."""

    def own_times(self) -> list[int]:
        """The nanoseconds of the thread's own time that each of the last replays on trial took."""


def _samples() -> deque[float]:
    return deque(maxlen=ROUNDS * AFTER)


@define(eq=False)
class Payoff:
    """The times of replays and body of one entry, in seconds, of all rounds so far."""

    replays: deque[float] = field(factory=_samples)
    bodies: list[float] = field(factory=list)
    backward_replays: deque[float] = field(factory=_samples)
    backward_bodies: list[float] = field(factory=list)
    paths: list[tuple[TimedPath, int]] = field(factory=list)
    """Fast paths on trial, and how many replays each may serve in this round."""
    rounds: int = 0
    """How many rounds of measurements ended."""
    is_decided: bool = False
    """Whether nothing more has to be measured, or can be."""
    _noted: int = 0

    @property
    def number(self) -> int:
        """How many replays were timed in this round."""
        return self._noted + sum(most - path.left for path, most in self.paths)

    @property
    def wanted(self) -> int:
        """How many runs of the body still have to be measured in this round, one more with backward passes."""
        return BODIES * (self.rounds + 1) + bool(self.backward_replays) - len(self.bodies)

    @property
    def is_open(self) -> bool:
        """Whether more has to be measured."""
        return not self.is_decided

    @property
    def wants_body(self) -> bool:
        """Whether this call has to run the body. Several calls in a row do, so that its code is in the caches as it
        is in a loop without replays."""
        return not self.is_decided and self.number >= AFTER

    def is_in_doubt(self, operators: int) -> bool:
        """Whether replays may be slower than a body of so many operators on a device: until enough were timed, and
        then, if they took longer than that many launches. Else nothing more is measured."""
        if self.number < AFTER or self.rounds:
            return True
        times = [*self.replays, *[one * 1e-9 for path, _ in self.paths for one in path.own_times()]]
        if _usual(times) > operators * LAUNCH:
            return True
        self.give_up()
        return False

    def try_out(self, path: TimedPath) -> None:
        """Time what this fast path replays, until there is enough."""
        path.left = max(AFTER - self.number, 1)
        self.paths.append((path, path.left))

    def note_replay(self, seconds: float) -> None:
        """Note how long a replay took, in seconds."""
        self._noted += 1
        if self.is_open:
            self.replays.append(seconds)

    def note_body(self, seconds: float) -> None:
        """Note how long a run of the body took, in seconds."""
        self.bodies.append(seconds)
        if self.is_open and self.wanted <= 0:
            self._end_round()

    def give_up(self) -> None:
        """No measurement is possible."""
        self.replays.clear()
        self._decide()

    def _end_round(self) -> None:
        self.rounds += 1
        for path, _ in self.paths:
            self.replays.extend(nanoseconds * 1e-9 for nanoseconds in path.own_times())
        least, most = CLEAR
        if self.rounds == ROUNDS or not self._is_known or not least * self.body < self.replay < most * self.body:
            self._decide()
            return
        self._noted = 0
        for path, _ in self.paths:
            path.left = AFTER
        self.paths = [(path, AFTER) for path, _ in self.paths]

    def _decide(self) -> None:
        self.is_decided = True
        for path, _ in self.paths:
            path.left = -1
        self.paths.clear()

    def note_backward(self, seconds: float | None, *, is_replay: bool) -> None:
        """A backward pass took this long, by replay or of a run of the body; None: there was none."""
        if seconds is not None and self.is_open:
            (self.backward_replays if is_replay else self.backward_bodies).append(seconds)

    @property
    def replay(self) -> float:
        """Seconds that a replay takes, with its backward pass."""
        return _usual(self.replays) + _usual(self.backward_replays)

    @property
    def body(self) -> float:
        """Seconds that the body takes, with its backward pass."""
        return _usual(self.bodies) + _usual(self.backward_bodies)

    @property
    def _is_known(self) -> bool:
        """Whether enough was measured to compare."""
        passes = not self.backward_replays or len(self.backward_bodies) >= SAMPLES // 2
        return passes and len(self.replays) >= SAMPLES

    @property
    def loss(self) -> float:
        """Seconds that a replay takes longer than the body by more than is allowed; 0 where that is not known."""
        if self.is_open or not self.rounds or not self._is_known:
            return 0.0
        allowed = max(_SHARE * self.body, _LEAST) - _AROUND
        return self.replay - self.body if self.replay > self.body + allowed else 0.0


def _usual(seconds: Sequence[float]) -> float:
    return sorted(seconds)[: 2 + max(0, len(seconds) // 6 - 1)][-1] if seconds else 0.0


_KINDS = frozenset([torch.Tensor, torch.nn.Parameter])


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The tensors among arguments."""
    return [value for value in (*args, *kwargs.values()) if type(value) in _KINDS]


@define(eq=False)
class Trial:
    """The next calls run the body, and are taken for calls like the one before, with as little around it as can be."""

    entry: Any
    _wanted: int
    _any_number: bool = False
    """Calls with other numbers are such calls, too."""
    bodies: list[float] = field(factory=list)
    """Seconds that each run of the body took."""
    clock: Callable[[], float] = clock
    _shapes: Any = None

    @classmethod
    def of(cls, entry: Any, values: Sequence[Any], wanted: int, *, any_number: bool = False) -> Self | None:
        """None where a call is told by more than tensors and plain values."""
        if not {type(value) for value in values} <= _KINDS | SAME:
            return None
        return cls(entry, wanted, any_number, clock=clock_of(entry))

    def goes_on(self, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> bool:
        """Note that a call with these arguments took so long. False: it is another call, or was the last."""
        shapes = tuple([self._form_of(value) for value in (*args, *kwargs.values())])
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            return False
        self.bodies.append(seconds)
        return len(self.bodies) < self._wanted

    def _form_of(self, value: Any) -> Any:
        if type(value) in _KINDS:
            return value.shape
        if type(value) not in SAME:
            return object()  # such as an array, which compares member by member
        return type(value) if self._any_number and type(value) in (float, int) else value
