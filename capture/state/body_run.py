"""How far the body of one call has come: what is left to do after an error in this library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from capture.core.data import define
from capture.native import native


@define(eq=False)
class BodyRun:
    """What the body of a call has done so far. A call may run it more than once, as to verify: the last run counts."""

    runs: int = 0
    error: BaseException | None = None
    """What the body itself raised."""
    has_ended: bool = False
    is_own: bool = False
    """It ran with the caller's own arguments."""
    result: Any = None
    replayed: bool = False
    """A recording ran in its place: an exception in it comes from the body's operators."""
    watched: Any = None
    """The ``ObservedRun`` of the last run, if that was watched."""
    entry: Any = None
    """The ``Entry`` of the call, once it is known."""
    leaves: Any = ()
    """The leaves of the call, once they are known."""
    made: tuple[int, Callable[[Any, Sequence[Any]], Any]] | None = None
    """Set where a run's result is not yet the call's: the number of that run, and a function of its result and the
    call's leaves that makes the call's result."""
    begun: float = 0.0
    """When the call began, in seconds."""
    starts: int = 0
    """How often the call was begun anew, as its key came to be made of something else."""

    def begin(self, *, is_own: bool) -> None:
        """The body is about to run."""
        self.runs += 1
        self.is_own, self.has_ended, self.error, self.result = is_own, False, None, None

    def end(self, result: Any) -> None:
        """The body returned this."""
        self.has_ended, self.result = True, result

    def starts_over(self) -> int:
        """The call begins anew. Gives how often it did so far."""
        self.starts += 1
        return self.starts

    def will_make(self, make: Callable[[Any, Sequence[Any]], Any]) -> None:
        """The next run's result has to go through ``make`` to become the result of the call."""
        self.made = self.runs + 1, make

    @property
    def has_result(self) -> bool:
        """Whether the result of the last run is the result of the call."""
        return self.has_ended and self.is_own and not (self.made is not None and self.made[0] == self.runs)

    def outcome(self, leaves: Sequence[Any]) -> Any:
        """The result of the call whose last run returned."""
        made = self.made
        return self.result if made is None or made[0] != self.runs else made[1](self.result, leaves)

    def take_back(self) -> None:
        """The effects of the last run were undone. Nothing of it is kept: its tensors may lie in memory that is used
        again next."""
        self.runs -= 1
        self.is_own, self.has_ended, self.error, self.result, self.watched = False, False, None, None, None
        self.made = None

    def replay(self, result: Any) -> None:
        """A recording returned this in the body's place."""
        self.is_own, self.has_ended, self.error, self.result, self.watched = True, True, None, result, None
        self.made = None


class _Current(threading.local):
    run: BodyRun | None = None


_current = _Current()


def current() -> BodyRun | None:
    """The run of the call that this thread is in; None outside of calls."""
    return _current.run


def during(run: BodyRun, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a function, which is a call, with this as the run of its body."""
    return native.within(_current, "run", run, function, arguments)
