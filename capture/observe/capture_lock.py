"""One body at a time is watched or recorded in a process.

A body may wait for another thread: for a result from an executor, at a barrier, for a lock. If that thread comes to a
captured call which has to be watched or recorded, too, the two would wait for each other for ever. So nobody waits
for a holder that stands still: the call runs eagerly, and the next one tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from capture.core import forks
from capture.core.interrupts import let_through
from capture.native import native

Result = TypeVar("Result")

capture_lock = forks.lock()
"""Held while a body is watched or recorded."""
PATIENCE = 5.0  # seconds to wait for it where its holder may itself be waiting for this thread
_STILL = 3  # looks in a row, a tenth of a second apart, between which a holder that waits for something does nothing
_NOTHING = 0.002  # seconds of processor time between two looks: more than it takes to ask again and again


class BusyError(Exception):
    """Another thread watches or records, and may be waiting for this one."""


class _Holder:
    """The thread that has the lock by ``locked``: the clock of its processor time. None: nobody, or it has none."""

    clock: int | None = None


def locked(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call the function while no other thread watches or records. Not a context manager: a signal between two steps of
    Python could leave the lock held. Raises ``BusyError``, which ends as an eager call (``runtime.fault_boundary``)."""
    result: Result = native.locked(capture_lock, _held, (function, arguments), _Patience().ask)
    return result


def locked_in_turn(function: Callable[..., Result], *arguments: Any) -> Result:
    """As ``locked``, but wait as long as others take: who asks for a recording is to have one."""
    result: Result = native.locked(capture_lock, _held, (function, arguments), forks.wait_on)
    return result


def locked_or(otherwise: Callable[[], Result], function: Callable[..., Result], *arguments: Any) -> Result:
    """As ``locked``, but wait for ``PATIENCE`` also where the holder stands still. After that: what ``otherwise`` gives
    or raises."""
    begun: list[None] = []
    until = time.monotonic() + PATIENCE

    def run() -> Result:
        begun.append(None)
        return function(*arguments)

    def ask() -> None:
        if time.monotonic() > until:
            raise BusyError("another thread watches or records, and may be waiting for this one")

    try:
        result: Result = native.locked(capture_lock, _held, (run, ()), ask)
        return result
    except BusyError:
        if begun:
            raise
    return otherwise()


def _held(function: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
    before, _Holder.clock = _Holder.clock, _clock_here()
    try:
        return function(*arguments)
    finally:
        _Holder.clock = before


def _clock_here() -> int | None:
    """Asked for by the thread itself, as it has to be alive; None where systems have no such clocks."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return None if clock_of is None else clock_of(threading.get_ident())


class _Patience:
    """How long one thread waits for the lock."""

    __slots__ = ("_clock", "_still", "_until", "_used")

    def __init__(self) -> None:
        self._clock: int | None = None
        self._used = 0.0
        self._still = 0
        self._until: float | None = None

    def ask(self) -> None:
        """Called each time that the lock was not free for a tenth of a second. Raises where to wait on would be in
        vain."""
        now, clock, used = time.monotonic(), _Holder.clock, _used(_Holder.clock)
        self._until = now + PATIENCE if self._until is None else self._until
        is_still = clock is not None and clock == self._clock and used - self._used < _NOTHING
        self._still = self._still + 1 if is_still else 0
        self._clock, self._used = clock, used
        if self._still >= _STILL or now > self._until:
            raise BusyError("another thread watches or records, and may be waiting for this one")


def _used(clock: int | None) -> float:
    """Seconds of processor time that the thread of this clock has taken; 0 if it has ended."""
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError as error:
        let_through(error)
        return 0.0


@forks.in_child
def _forget_holder() -> None:
    """In a child: it may be a thread that does not exist there."""
    _Holder.clock = None
