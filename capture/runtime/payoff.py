"""Payoff: whether replays of a recording are faster than its body.

They are not where the body is short, or where a replay goes through Python. After ``AFTER`` replays ``BODIES`` calls
run the body in their place, and of each the second shortest is compared: what waited for something else took longer,
and a single call that had less to do decides nothing.
A fast path serves so many replays, and then leads to the body until that was measured. Where one recording is in use,
and nothing follows on it, the bodies run with nothing before them (``Trial``): what a call goes through takes the code
of a small body out of the processor's caches, which makes it up to twice as slow as in a loop of its own.
Of forward and backward passes that are recorded apart the sums are compared.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from attrs import define, field

from capture.guards.key_guards import SAME
from capture.key.signature import Leaf

AFTER = 12
"""Replays before the body is measured."""
SAMPLES = 5
BODIES = 10
"""Runs of the body that are measured: Python runs code that is new for some eight times before it is at its fastest."""
_SHARE, _LEAST = 0.05, 5e-6  # a replay may take this share more than the body, or so many seconds
_AROUND = 3e-6  # seconds that a call takes besides its replay

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
    backward_replays: deque[float] = field(factory=lambda: deque(maxlen=SAMPLES))
    backward_bodies: list[float] = field(factory=list)
    paths: list[tuple[TimedPath, int]] = field(factory=list)
    """Fast paths on trial, and how many replays each may serve."""
    _noted: int = 0
    _is_given_up: bool = False

    @property
    def number(self) -> int:
        """Of replays."""
        return self._noted + sum(most - path.left for path, most in self.paths)

    @property
    def wanted(self) -> int:
        """Runs of the body that are still to be measured. The last one's backward pass is to come."""
        return BODIES + bool(self.backward_replays) - len(self.bodies)

    @property
    def is_open(self) -> bool:
        """More is to be measured."""
        return self.wanted > 0 and not self._is_given_up

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
        """A run of the body did."""
        self.bodies.append(seconds)
        if not self.is_open:
            self._open_paths()

    def give_up(self) -> None:
        """No measurement is possible."""
        self._is_given_up = True
        self._open_paths()

    def _open_paths(self) -> None:
        for path, _ in self.paths:
            self.replays.extend(nanoseconds * 1e-9 for _, nanoseconds in path.times())
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
    def loss(self) -> float:
        """Seconds that a replay takes longer than the body by more than is allowed; 0 where that is not known."""
        if self.is_open or self._is_given_up or len(self.replays) < SAMPLES:
            return 0.0
        if self.backward_replays and len(self.backward_bodies) < SAMPLES // 2:
            return 0.0
        allowed = max(_SHARE * self.body, _LEAST) - _AROUND
        return self.replay - self.body if self.replay > self.body + allowed else 0.0


def _usual(seconds: Sequence[float]) -> float:
    return sorted(seconds)[:2][-1] if seconds else 0.0


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
    """Seconds."""
    _shapes: Any = None

    @classmethod
    def of(cls, entry: Any, values: Sequence[Any], wanted: int, *, any_number: bool = False) -> Self | None:
        """None where a call is told by more than tensors and plain values."""
        return cls(entry, wanted, any_number) if {type(value) for value in values} <= _KINDS | SAME else None

    def goes_on(self, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> bool:
        """A call with these arguments took so long. False: it is another one, or was the last."""
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
        return type(value) if self._any_number and type(value) in (float, int) else value
