"""Free functions on captured functions: explain, warm up, look inside, forget."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from attrs import frozen
from typing_extensions import override

from capture import _cases, _observe, _report, _store, _warm, _watched
from capture._call import Call
from capture._cases import Case, WarmupReport
from capture._compile import compile_plan
from capture._decorate import all_states, captured_state, captured_states
from capture._describe import describe
from capture._errors import AnnotationError
from capture._events import Counters, Event
from capture._facts import Facts
from capture._findings import Finding, Severity
from capture._lock import capture_lock
from capture._plan import CapturePlan
from capture._runtime import Captured
from capture._store import LoadReport

P = ParamSpec("P")
R = TypeVar("R")


@frozen(kw_only=True)
class Explanation:
    """What ``capture`` would do with one call and why. ``print`` it."""

    outcome: Literal["record", "eager"]
    plan: CapturePlan
    facts: Facts

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All remarks, most severe first."""
        return self.plan.findings

    def findings_at_least(self, severity: Severity | Literal["note", "copy", "eager", "error"]) -> tuple[Finding, ...]:
        """Remarks of this severity and above."""
        least = Severity[severity.upper()] if isinstance(severity, str) else severity
        return self.plan.findings_at_least(least)

    @override
    def __str__(self) -> str:
        return _report.format_plan(self.plan)


@frozen(kw_only=True)
class Recordings:
    """Totals of one captured function since it was decorated or reset. Times in the events are milliseconds."""

    function: str
    observations: int
    recordings: int
    replays: int
    rebinds: int
    eager_calls: int
    checkpoints: int
    misses: int
    evacuations: int
    verifications: int
    body_runs: int
    plans_loaded: int
    plans_stale: int
    findings: tuple[Finding, ...]
    pool_bytes: int
    """High-water mark of the pools this function records into, shared with all functions of the same thread."""
    graph_bytes: int
    """Memory of the recorded graphs themselves; 0 on the CPU engine, whose graphs are Python code."""
    events: tuple[Event, ...]
    """The time log, oldest first: observations, recordings, checkpoints, misses ...; the last 1000 of each instance."""

    @override
    def __str__(self) -> str:
        counted = ("recordings", "replays", "rebinds", "eager_calls", "observations")
        return f"{self.function}: " + ", ".join(f"{getattr(self, name)} {name.replace('_', ' ')}" for name in counted)


def explain(function: Callable[P, R]) -> Callable[P, Explanation]:
    """``explain(fn)(*args)`` watches one eager run and says what would be recorded, or why nothing would be.

    Changes nothing: the caller's tensors, Python state and generators are put back, no recording is made. Works on
    functions that are not captured, too. An exception of the body comes out unchanged.
    """
    captured = _one_state(function)

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> Explanation:
        call = _bound(captured, function, args, kwargs)
        with capture_lock:
            watched = _watched.run_watched(call, _observe.Watch(undo=True))
            try:
                if watched.error is not None:
                    raise watched.error
                described = describe(watched)
            finally:
                _watched.undo(watched)
        plan = compile_plan(captured.annotation, described.facts)
        return Explanation(outcome=plan.outcome, plan=plan, facts=described.facts)

    return explained


def _bound(captured: Captured, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    values = _values(captured, function, args, kwargs)
    return captured.call(values, _warm.leaves_of(values))


def _values(captured: Captured, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if isinstance(function, types.MethodType) and captured.receiver is None:
        args = (function.__self__, *args)  # a method whose first parameter is not called self
    return captured.binder.values(*args, **kwargs)


def _one_state(function: Any) -> Captured:
    try:
        states = captured_states(function)
    except TypeError:
        from capture._decorate import capture

        function = getattr(function, "forward", function) if isinstance(function, torch.nn.Module) else function
        states = captured_states(capture(function))
    if len(states) != 1:
        raise AnnotationError("this is a method of a class; use it through an instance, as in explain(net.step)(x)")
    return states[0]


class Warmup(Generic[P]):
    """``warmup(fn)``: call it with the arguments of one call, or give it many ``cases``."""

    def __init__(self, function: Callable[P, object]) -> None:
        self._function: Any = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Warm up one call. Says what a call would say where it cannot be recorded; the body's exceptions come out."""
        captured = captured_state(self._function)
        _warm.warm_up(captured, _values(captured, self._function, args, kwargs))

    def cases(self, cases: Iterable[Case], *, progress: bool | None = None) -> WarmupReport:
        """Warm up many calls, those with the most bytes of tensor arguments first.

        The largest grows the pool, so that the others fit into what is there; the other way round a pool on a GPU
        grows with each, as what was asked for apart does not merge. A case that cannot be recorded does not stop the
        others: the report has its reason, and a ``CaptureWarning`` says it once, with ``fallback="error"`` and for
        exceptions of the body, too.

        Args:
            cases: a tuple of positional arguments, a mapping of keyword arguments, or ``(args, kwargs)`` each. All are
                held until the end. Beyond ``max_recordings`` the smallest are skipped (CG901), without a run.
            progress: show a bar on standard error, through ``rich`` if it is installed, with cases, seconds and
                bytes of pool and graphs. Default: only if standard error is a terminal.

        Raises:
            TypeError: a case has another form, or the function does not take its arguments; nothing has run then.
        """
        captured = captured_state(self._function)
        values = _cases.bound(
            captured.annotation.function, cases, lambda args, kwargs: _values(captured, self._function, args, kwargs)
        )
        return _cases.warm_up_all(captured, values, progress)


def warmup(function: Callable[P, R]) -> Warmup[P]:
    """``warmup(fn)(*args)`` brings a captured function to replay for arguments like these.

    ``warmup(fn).cases([(x,), (y,)])`` does so for many calls, the largest first, and reports on each. The caller's
    tensors, module state, Python state and generators are afterwards as they were before. Does nothing where a
    recording is impossible, or beyond ``max_recordings``, except to say so as a call would. Call it in the thread, and
    under the modes (``torch.inference_mode()``, autocast), that the calls come in: both belong to a recording.

    Raises ``AnnotationError`` for what is not captured, and for a method of a class instead of an instance.
    """
    return Warmup(function)


def plans(function: Any) -> tuple[CapturePlan, ...]:
    """Plans made or loaded so far, one a key, oldest first."""
    states = captured_states(function)
    return tuple(entry.plan for captured in states for entry in captured.entries() if entry.plan is not None)


def recordings(function: Any) -> Recordings:
    """Counters, findings and events of a captured function; of all its instances together for a class's method."""
    states = captured_states(function)
    total = Counters().items()
    for captured in states:
        for name, count in captured.log.counters.items().items():
            total[name] = total.get(name, 0) + count
    pool_bytes, graph_bytes = _cases.memory_of(states)
    findings = {key: finding for captured in states for key, finding in captured.findings.items()}
    return Recordings(
        function=states[0].annotation.function if states else "(no call yet)",
        findings=tuple(findings.values()),
        pool_bytes=pool_bytes,
        graph_bytes=graph_bytes,
        events=tuple(sorted((e for captured in states for e in captured.log.events), key=lambda e: e.at)),
        **total,
    )


def report() -> str:
    """A table of all captured functions: recordings, replays, eager calls and why."""
    return _report.format_summary(
        [(c.annotation.function, c.log.counters.items(), tuple(c.findings.values())) for c in all_states()]
    )


def reset(function: Any = None) -> None:
    """Forget everything about a captured function, or about all: recordings, plans in memory, warnings, counters."""
    for captured in all_states() if function is None else captured_states(function):
        captured.reset()


def release(function: Any = None) -> None:
    """Destroy recordings now; plans stay, so the next call records again without a watched run."""
    for captured in all_states() if function is None else captured_states(function):
        captured.release()


def save_plans(directory: str | os.PathLike[str]) -> int:
    """Write the plans of all captured functions to a directory, one JSON file each; gives their number."""
    found = [entry.plan for captured in all_states() for entry in captured.entries() if entry.plan is not None]
    return _store.save_plans(Path(directory), found)


def load_plans(directory: str | os.PathLike[str]) -> LoadReport:
    """Use the plans in a directory from now on, as if this process had made them. Damaged or stale files are named."""
    return _store.load_plans(Path(directory))
