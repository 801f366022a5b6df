"""Bodies that raise in calls that a test chooses."""

from __future__ import annotations

from tests.support.unseen import Notes


class Trouble(Exception):
    """Raised by bodies under test."""


class Trigger:
    """Counts calls, says which ones fail, and knows how often the body has run."""

    def __init__(self, fail_on: set[int]) -> None:
        self.fail_on = fail_on
        self.calls = 0
        self.due: list[None] = []
        self.noted = Notes()

    @property
    def runs(self) -> list[str]:
        """One note for each run of the body."""
        return self.noted.all()

    def begin(self) -> None:
        """Count a call."""
        self.calls += 1
        self.due[:] = [None] * (self.calls in self.fail_on)


class Gate:
    """Raises in calls that have to fail. It asks by a builtin method and notes its runs in memory of C, so that no
    guard or snapshot sees Python state, and calls that do not fail are replayed. An engine may run the body more than
    once in a call."""

    def __init__(self, trigger: Trigger, error: BaseException) -> None:
        self.is_due = trigger.due.__len__
        self.ran = trigger.noted.add
        self.error = error

    def check(self) -> None:
        self.ran(None)
        if self.is_due():
            raise self.error


class OpenGate:
    """Raises where an attribute says so, which the caller sets and the body reads."""

    def __init__(self) -> None:
        self.is_shut = False

    def check(self) -> None:
        if self.is_shut:
            raise Trouble("in the middle")
