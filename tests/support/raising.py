"""Bodies that raise in calls that a test chooses."""

from __future__ import annotations

from tests.support.unseen import Notes


class Trouble(Exception):
    """Raised by bodies under test."""


class Trigger:
    """What the caller of a net knows: which calls fail, which one this is, and how often the body has run."""

    def __init__(self, fail_on: set[int]) -> None:
        self.fail_on = fail_on
        self.calls = 0
        self.due: list[None] = []
        self.noted = Notes()

    @property
    def runs(self) -> list[str]:
        """One for each run of the body."""
        return self.noted.all()

    def begin(self) -> None:
        """One more call."""
        self.calls += 1
        self.due[:] = [None] * (self.calls in self.fail_on)


class Gate:
    """Raises where it is due. It asks by a builtin method, and notes that it ran in memory of C's: no Python state that
    a guard or a snapshot sees, so the calls that do not fail are replayed. An engine may run the body more than once in
    a call."""

    def __init__(self, trigger: Trigger, error: BaseException) -> None:
        self.is_due = trigger.due.__len__
        self.ran = trigger.noted.add
        self.error = error

    def check(self) -> None:
        self.ran(None)
        if self.is_due():
            raise self.error


class OpenGate:
    """Raises where the caller says so in an attribute, which the body reads."""

    def __init__(self) -> None:
        self.is_shut = False

    def check(self) -> None:
        if self.is_shut:
            raise Trouble("in the middle")
