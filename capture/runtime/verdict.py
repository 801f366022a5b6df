"""Verdicts: what a stage hands back to dispatch, which alone acts on it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

from capture.core.data import frozen
from capture.core.facts import Facts
from capture.core.plan import CapturePlan
from capture.engines.base import Move


class Verdict(Enum):
    """How a call goes on."""

    DONE = "the call has its result"
    REPLAY = "the recording that was found fits"
    OBSERVE = "nothing that is known holds: watch an eager run"
    EAGER = "run the body, on the caller's own tensors"
    GO_ON = "phase or recordings of the entry are others now: go on by those"
    START_OVER = "what the key is made of is another: begin the call anew"


@frozen(eq=False)
class Refuted:
    """A run that was to be a recording was none, or not the one that was planned: what it showed, and why."""

    facts: Facts
    plan: CapturePlan
    reason: str
    is_branch: bool = False
    """It was as good as a watched run of a branch that no run took before."""


@frozen(eq=False)
class Reply:
    """A verdict, and what belongs to it."""

    verdict: Verdict
    result: Any = None
    """The call's result, with ``DONE``."""
    reason: str = ""
    """In the user's words, with ``EAGER``."""
    plan: CapturePlan | None = None
    """With ``EAGER``: the plan for all later calls."""
    refuted: Refuted | None = None
    body_first: bool = False
    """With ``refuted``: the body runs before the plan is replaced; eager's own error, if there is one, comes first."""
    interrupt: BaseException | None = None
    """With ``EAGER``: an interrupt to raise after the body ran."""
    learned: Sequence[Move] = ()
    """With ``REPLAY``: what the recording follows only since this call. It is compared with eager first."""


@frozen
class Outcome:
    """What became of a call that was to be recorded and undone. ``code`` is the rule's where a rule forbids it."""

    status: Literal["recorded", "known", "skipped"]
    reason: str = ""
    code: str | None = None


GO_ON = Reply(Verdict.GO_ON)
START_OVER = Reply(Verdict.START_OVER)


def done(result: Any) -> Reply:
    """The call has its result."""
    return Reply(Verdict.DONE, result)
