"""Which calls were replays, and why the others were not: asserts over the counters and the time log."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from attrs import field

from capture.api.decorator import all_states, captured_states
from capture.core import config
from capture.core.data import define
from capture.core.errors import CaptureWarning, UncapturableError
from capture.core.events import Event, Log, listening
from capture.core.findings import Finding, Severity
from capture.runtime.captured import Captured

P = ParamSpec("P")
R = TypeVar("R")

_WARM_CALLS = 5
"""Calls, beside those that ``warmup=`` asks for, after which a function replays or never will: one is watched, one
recorded, and bodies that set something up once are watched up to three times."""
_TOLD = ("observe", "warm-up", "record", "miss", "drop", "eager", "fallback")
"""Kinds of events that tell why a call was no replay."""


def assert_replayed(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a captured function until it replays, then once more, which must be a replay too. Gives its result.

    Every call is a real one: what the function writes is written as often as it is called, up to ``warmup=`` + 6
    times. Warnings of ``capture`` are not shown, as the error says the same.

    Args:
        function: a captured function, a captured module, or a method of an instance.
        args, kwargs: of every call.

    Raises:
        AssertionError: no call was a replay; the message has the findings and what happened instead.
        AnnotationError: the function is not captured.

    Exceptions of the function come out unchanged.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    begin = time.perf_counter()
    counts = _Counts(captured_states(function))
    limit = _WARM_CALLS + max((state.annotation.warmup for state in counts.states), default=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        try:
            for _ in range(limit):
                function(*args, **kwargs)
                counts.add(captured_states(function))
                if counts.since("replays"):
                    break
            else:
                raise AssertionError(_no_replay(function, counts, begin, f"none of {limit} equal calls was a replay"))
            with assert_only_replays(function):
                return function(*args, **kwargs)
        except UncapturableError as error:
            raise AssertionError(f"{_name(function, counts)} cannot be captured:\n{error}") from error


@contextmanager
def assert_only_replays(*functions: Callable[..., Any]) -> Iterator[None]:
    """Every call of these captured functions in the block is a replay, and each is called.

    ``verify=`` may run the body beside a replay. A call inside another captured function's body is part of that one's
    recording and no call of its own here.

    Raises:
        AssertionError: at the end of the block: a function ran its body, or was not called.
        AnnotationError: a function is not captured.
    """
    __tracebackhide__ = True
    counted = [(function, _Counts(captured_states(function))) for function in functions]
    begin = time.perf_counter()
    yield
    wrong = []
    for function, counts in counted:
        counts.add(captured_states(function))
        others = counts.since("body_runs") - counts.since("verifications") - counts.since("measured_calls")
        if others > 0 or counts.since("eager_calls"):
            runs = "1 call" if others == 1 else f"{others} calls"
            wrong.append(_no_replay(function, counts, begin, f"{runs} ran the body instead of a replay"))
        elif not counts.since("replays"):
            wrong.append(_no_replay(function, counts, begin, "was not called, or only inside another function's body"))
    if wrong:
        raise AssertionError("\n\n".join(wrong))


@contextmanager
def assert_no_eager(*functions: Callable[..., Any]) -> Iterator[None]:
    """No captured function becomes eager in the block: none of these, or, without any, none in the process.

    Watched runs, warm-ups and recordings are no failures: they lead to replays. A call that runs eagerly because of a
    finding is one, also where the finding is older than the block.

    Raises:
        AssertionError: at the end of the block, with the findings of each function, if the block itself raised nothing.
        AnnotationError: a function is not captured.
    """
    __tracebackhide__ = True
    states = [state for function in functions for state in captured_states(function)] if functions else all_states()
    before = {id(state): state.log.counters.eager_calls for state in states}
    watched = {id(state.log) for state in states}
    eager: dict[int, _EagerFunction] = {}

    def listen(log: Log, event: Event) -> None:
        if event.kind in ("eager", "fallback") and (not functions or id(log) in watched):
            eager.setdefault(id(log), _EagerFunction(log)).add(event)

    with listening(listen):
        yield
    for state in states if functions else all_states():  # an eager call that said nothing new is counted only
        if state.log.counters.eager_calls > before.get(id(state), 0) and id(state.log) not in eager:
            eager[id(state.log)] = _EagerFunction(state.log, findings=_lasting(state))
    if eager:
        raise AssertionError("\n\n".join(data.text() for data in eager.values()))


@define
class _EagerFunction:
    """What was told of one function that became eager. It is gathered at once: the function may die before the end."""

    log: Log
    reasons: list[str] = field(factory=list)
    findings: dict[tuple[str, str | None], Finding] = field(factory=dict)

    def add(self, event: Event) -> None:
        """Add an event."""
        if event.detail not in self.reasons:
            self.reasons.append(event.detail)
        for state in all_states():
            if state.log is self.log:
                self.findings.update(_lasting(state))

    def text(self) -> str:
        """The block of the message about this function."""
        head = f"{self.log.function} became eager"
        blocks = [finding.message(function=self.log.function) for finding in self.findings.values()]
        return "\n".join([head, *(blocks or self.reasons)])


@define
class _Counts:
    """Counters of some functions since this was made. The class of a method may get instances meanwhile."""

    states: list[Captured]
    before: dict[int, dict[str, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.before = {id(state): state.log.counters.items() for state in self.states}

    def add(self, states: list[Captured]) -> None:
        """States that are new count from zero."""
        known = {id(state) for state in self.states}
        self.states += [state for state in states if id(state) not in known]

    def since(self, name: str) -> int:
        """By how much a counter rose."""
        return sum(
            state.log.counters.items()[name] - self.before.get(id(state), {}).get(name, 0) for state in self.states
        )


def _lasting(state: Captured) -> dict[tuple[str, str | None], Finding]:
    return {key: finding for key, finding in state.findings.items() if finding.severity >= Severity.EAGER}


def _name(function: Callable[..., Any], counts: _Counts) -> str:
    if counts.states:
        return counts.states[0].annotation.function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _no_replay(function: Callable[..., Any], counts: _Counts, begin: float, what: str) -> str:
    """What happened instead: the findings that keep the function eager, and the events since ``begin``."""
    lines = [f"{_name(function, counts)}: {what}"]
    if not config.current().enabled:
        lines.append("captured functions are switched off (CAPTURE_ENABLED=0, or config.patch(enabled=False))")
    for state in counts.states:
        lines += [finding.message(function=state.annotation.function) for finding in _lasting(state).values()]
    events = [event for state in counts.states for event in state.log.events if event.at >= begin]
    lines += [f"  {event.kind}: {event.detail}".rstrip(": ") for event in events if event.kind in _TOLD]
    return "\n".join(lines)
