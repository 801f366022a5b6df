"""How far the body of one call has come: what is left to do where something goes wrong in this library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from attrs import define

from capture.native import native


@define(eq=False)
class BodyRun:
    """What the body of a call has done so far. A call may run it more than once, as to verify: the last run counts."""

    runs: int = 0
    error: BaseException | None = None
    """The body's own."""
    has_ended: bool = False
    is_own: bool = False
    """It ran with the caller's own arguments."""
    result: Any = None
    replayed: bool = False
    """A recording ran in its place: what it raises, the body's operators raise."""
    watched: Any = None
    """The ``ObservedRun`` of the last run, if it was watched."""
    entry: Any = None
    """The ``Entry`` of the call, once it is known."""
    leaves: Any = ()
    """The call's, by then."""
    begun: float = 0.0
    """When the call came here, in seconds."""

    def begin(self, *, is_own: bool) -> None:
        """The body is about to run."""
        self.runs += 1
        self.is_own, self.has_ended, self.error, self.result = is_own, False, None, None

    def end(self, result: Any) -> None:
        """It gave this."""
        self.has_ended, self.result = True, result

    def take_back(self) -> None:
        """What the last run did was undone, as if it had not run. Nothing of it is kept: its tensors may lie in memory
        that is about to be used for something else."""
        self.runs -= 1
        self.is_own, self.has_ended, self.error, self.result, self.watched = False, False, None, None, None

    def replay(self, result: Any) -> None:
        """A recording gave this in its place."""
        self.is_own, self.has_ended, self.error, self.result, self.watched = True, True, None, result, None


class _Current(threading.local):
    run: BodyRun | None = None


_current = _Current()


def current() -> BodyRun | None:
    """Of the call that this thread is in; None outside of calls."""
    return _current.run


def during(run: BodyRun, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What the function gives: a call, whose body's run this is."""
    return native.within(_current, "run", run, function, arguments)
