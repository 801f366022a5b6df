"""Functions on captured functions: explain, warm up, look inside, forget."""

from __future__ import annotations

import functools
import os
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, ParamSpec, TypeVar

import torch
from typing_extensions import override

from capture.api import warmup as _warmup
from capture.api.decorator import all_states, begin_anew, captured_state, captured_states
from capture.api.progress import progress
from capture.api.warmup import Case, RecordingSize, WarmupReport
from capture.core.data import frozen
from capture.core.errors import AnnotationError, CaptureWarning
from capture.core.events import Counters, Event
from capture.core.facts import Facts
from capture.core.findings import Finding, Policy, Severity
from capture.core.interrupts import guarded
from capture.core.plan import CapturePlan
from capture.core.sizes import bytes_text
from capture.guards.guard import text_of
from capture.guards.recording_guard import make_recording_guard
from capture.observe import dispatch_mode, run
from capture.observe.capture_lock import locked_in_turn
from capture.observe.described import DescribedRun
from capture.observe.facts_builder import describe, uses_unwritten
from capture.plan_cache import store
from capture.plan_cache.store import LoadReport
from capture.reporting import text
from capture.reporting.tables import Table, Tabular
from capture.rules.compile_plan import compile_plan
from capture.runtime import branches, lives
from capture.runtime.captured import Captured
from capture.state.call import Call

P = ParamSpec("P")
R = TypeVar("R")


@frozen(kw_only=True)
class Explanation(Tabular):
    """What ``capture`` would do with one call and why. ``print`` it; a notebook shows tables."""

    outcome: Literal["record", "eager"]
    plan: CapturePlan
    facts: Facts
    guards: tuple[str, ...] = ()
    """What would be compared before every replay, one line each: path, kind, expected value."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, most severe first."""
        return self.plan.findings

    def segments(self) -> str:
        """The segments that a replay would run, and what lies between them, a line each: values that are read, with
        one wait each, and islands, with the milliseconds that they took in this run. Empty where there is one segment,
        or the call would be eager."""
        return text.format_segments(self.plan, self.facts.breaks).rstrip()

    def findings_at_least(self, severity: Severity | Literal["note", "copy", "eager", "error"]) -> tuple[Finding, ...]:
        """Findings of this severity and above."""
        least = Severity[severity.upper()] if isinstance(severity, str) else severity
        return self.plan.findings_at_least(least)

    @override
    def tables(self) -> list[Table]:
        """The tables of the plan, and one of guards."""
        more = [text.format_segments(self.plan, self.facts.breaks), text.format_guards(self.guards)]
        return [*text.plan_tables(self.plan), *[Table(notes=(one.rstrip(),)) for one in more if one]]

    @override
    def __str__(self) -> str:
        segments = text.format_segments(self.plan, self.facts.breaks)
        return text.format_plan(self.plan) + segments + text.format_guards(self.guards)


@frozen(kw_only=True)
class Recordings(Counters, Tabular):
    """Totals of one captured function since it was decorated or reset. ``print`` it; a notebook shows tables.

    Times in the events are milliseconds.
    """

    function: str
    findings: tuple[Finding, ...]
    pool_bytes: int
    """High-water mark of the pools this function records into, shared with all functions of the same thread."""
    graph_bytes: int
    """Memory of the recorded graphs themselves; 0 on the CPU engine, whose graphs are Python code."""
    sizes: tuple[RecordingSize, ...]
    """What each existing recording takes; ``evictions`` and events of kind ``drop`` tell which were dropped."""
    events: tuple[Event, ...]
    """The time log, oldest first: observations, recordings, checkpoints, misses ...; the last 128 of each instance."""

    @override
    def tables(self) -> list[Table]:
        """Tables of calls by kind, of recordings, and of findings."""
        calls = {kind: number for kind, number in self.calls().items() if number}
        shown = [Table(title=str(self), head=tuple(calls), rows=(tuple(map(str, calls.values())),) if calls else ())]
        sizes = tuple(
            (
                size.arguments,
                str(size.num_ops),
                *map(bytes_text, (size.output_bytes, size.working_bytes, size.graph_bytes)),
            )
            for size in self.sizes
        )
        if sizes:
            head = ("recorded for", "operators", "outputs", "while it runs", "graph")
            shown.append(Table(title="recordings", head=head, rows=sizes))
        return [*shown, *(Table(notes=(finding.message(function=self.function),)) for finding in self.findings)]

    @override
    def __str__(self) -> str:
        return f"{self.function}: {self.text()}"


class _ToBeCalled(Generic[P]):
    """The result of ``explain(fn)`` and ``warmup(fn)``, to be called with the arguments of a call to ``fn``. Its text
    says so, and it warns if it is dropped without a call, since nothing has happened then.
    """

    _verb: ClassVar[str]
    _instead: ClassVar[str] = ""
    _called = True  # set until there is a function to call

    def __init__(self, function: Callable[P, object], given: Sequence[object] = ()) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self._text = f"{self._verb}({name})(...), with the arguments of a call to {name}{self._instead}"
        if given:
            raise AnnotationError(f"{self._verb} takes the function alone; write {self._text}")
        self._function: Any = function
        wrapper: Any = self
        functools.update_wrapper(wrapper, function, updated=())
        self._called = False

    @override
    def __repr__(self) -> str:
        return f"<to be called: {self._text}>"

    def __del__(self) -> None:
        if not self._called:
            text = f"{self._verb} was given a function and no call: nothing happened; write {self._text}"
            warnings.warn(text, CaptureWarning, stacklevel=2)


def explain(function: Callable[P, R], /, *given: object) -> Callable[P, Explanation]:
    """``explain(fn)(*args)`` watches one eager run and says what would be recorded, or why nothing would be.

    Changes nothing: the caller's tensors, Python state and generators are put back, no recording is made. Works on
    functions that are not captured, too. An exception of the body comes out unchanged.

    Raises ``AnnotationError`` for ``explain(fn, *args)``, which is one call where there should be two.
    """
    return _Explain(function, given)


class _Explain(_ToBeCalled[P]):
    _verb = "explain"

    def __init__(self, function: Callable[P, object], given: Sequence[object] = ()) -> None:
        self._captured = state_of(function)
        super().__init__(function, given)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Watch one eager run of the function with these arguments."""
        self._called = True
        captured, function = self._captured, self._function
        call = _bound(captured, function, args, kwargs)
        return locked_in_turn(_explanation, captured, call)


def _explanation(captured: Captured, call: Call) -> Explanation:
    watched, described = guarded(_watched, (call,), functools.partial(run.undo_stopped, call))
    described.facts = branches.explained(described.facts)
    plan = compile_plan(captured.annotation, described.facts)
    guards = _guards(call, described, watched, plan) if plan.outcome == "record" else ()
    return Explanation(outcome=plan.outcome, plan=plan, facts=described.facts, guards=guards)


def _watched(call: Call) -> tuple[run.ObservedRun, DescribedRun]:
    """One watched run of the call, and its description. Everything that the run changed is put back."""
    watched = run.run_watched(call, dispatch_mode.ObserveMode(undo=True))
    if watched.error is not None:
        raise watched.error
    described = describe(watched)
    run.undo(watched)
    call.forget_run()
    if uses_unwritten(watched, described):
        call.by_mode = True
        return _watched(call)
    return watched, described


def _guards(call: Call, described: DescribedRun, watched: run.ObservedRun, plan: CapturePlan) -> tuple[str, ...]:
    """The guards that a recording of this run would have."""
    policies = {placeholder.path: placeholder.policy for placeholder in plan.placeholders}
    told = [policies.get(path) for path, _ in call.paths()]
    static = [at for at, policy in enumerate(told) if policy is Policy.STATIC]
    copied = [at for at, policy in enumerate(told) if policy in (Policy.COPY, Policy.COPY_BACK)]
    return tuple(map(text_of, make_recording_guard(described, watched, call, static, copied, watched.ran).guards()))


def _bound(captured: Captured, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    values = values_of_call(captured, function, args, kwargs)
    return captured.call(values, _warmup.leaves_of(values))


def values_of_call(captured: Captured, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The values of all parameters, without the receiver. Raises ``TypeError`` for arguments that do not fit."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if isinstance(function, types.MethodType) and captured.receiver is None:
        args = (function.__self__, *args)  # a method that was captured as a function and put into a class later
    return captured.binder.values(*args, **kwargs)


def state_of(function: Any) -> Captured:
    """The state behind one function; a new one, unknown to its caller, for what is not captured."""
    try:
        states = captured_states(function)
    except TypeError:
        from capture.api.decorator import capture

        function = getattr(function, "forward", function) if isinstance(function, torch.nn.Module) else function
        states = captured_states(capture(function))
    if len(states) != 1:
        raise AnnotationError("this is a method of a class; use it through an instance, as in explain(net.step)(x)")
    return states[0]


class Warmup(_ToBeCalled[P]):
    """``warmup(fn)``: call it with the arguments of one call, or give it many ``cases``."""

    _verb, _instead = "warmup", ", or warmup(...).cases([...])"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Warm up one call. Where it cannot be recorded, this reports the same as a call; exceptions of the body are
        raised."""
        self._called = True
        captured = captured_state(self._function)
        values = values_of_call(captured, self._function, args, kwargs)
        with progress(f"warm-up of {captured.annotation.function}", 1, None) as update:
            _warmup.warm_up(captured, values if captured.sizes is None else captured.sizes.padded(values))
            update(1, sum(_warmup.memory_of([captured])))

    def cases(self, cases: Iterable[Case], *, progress: bool | None = None) -> WarmupReport:
        """Warm up many calls, those with the most bytes of tensor arguments first.

        The largest grows the pool, so that the others fit into what is there; the other way round a pool on a GPU
        grows with each, as what was asked for apart does not merge. A case that cannot be recorded does not stop the
        others: the report has its reason, and a ``CaptureWarning`` says it once, with ``fallback="error"`` and for
        exceptions of the body, too.

        Args:
            cases: a tuple of positional arguments, a mapping of keyword arguments, or ``(args, kwargs)`` each. All are
                held until the end. Beyond ``max_recordings`` the smallest are skipped (CG901), without a run. With
                ``buckets=`` each case is one for every combination of sizes on the ladders, of ``"pow2"`` up to its
                own size, made from it by cutting and padding.
            progress: show a bar on standard error, through ``rich`` if it is installed, with cases, seconds and
                bytes of pool and graphs. Default: only if standard error is a terminal.

        Raises:
            TypeError: a case has another form, or the function does not take its arguments; nothing has run then.
        """
        self._called = True
        captured = captured_state(self._function)
        values = _warmup.bound(
            captured.annotation.function,
            cases,
            lambda args, kwargs: values_of_call(captured, self._function, args, kwargs),
        )
        if captured.sizes is not None:
            values = [values_of_size for case in values for values_of_size in captured.sizes.cases(case)]
        return _warmup.warm_up_all(captured, values, progress)


def warmup(function: Callable[P, R], /, *arguments: object) -> Warmup[P]:
    """``warmup(fn)(*args)`` brings a captured function to replay for arguments like these.

    ``warmup(fn).cases([(x,), (y,)])`` does so for many calls, the largest first, and reports on each. The caller's
    tensors, module state, Python state and generators are afterwards as they were before. Does nothing where a
    recording is impossible, or beyond ``max_recordings``, except to say so as a call would. Call it in the thread, and
    under the modes (``torch.inference_mode()``, autocast), that the calls come in: both belong to a recording.

    Raises ``AnnotationError`` for what is not captured, for a method of a class instead of an instance, and for
    ``warmup(fn, *args)``, which is one call where there should be two.
    """
    return Warmup(function, arguments)


def plans(function: Any) -> tuple[CapturePlan, ...]:
    """Plans made or loaded so far, one a key, oldest first."""
    states = captured_states(function)
    return tuple(entry.plan for captured in states for entry in captured.entries() if entry.plan is not None)


def recordings(function: Any) -> Recordings:
    """Counters, findings and events of a captured function; of all its instances together for a class's method."""
    states = captured_states(function)
    total = Counters.total(captured.log.counters for captured in states)
    pool_bytes, graph_bytes = _warmup.memory_of(states)
    findings = {key: finding for captured in states for key, finding in captured.findings.items()}
    return Recordings(
        function=states[0].annotation.function if states else "(no call yet)",
        findings=tuple(findings.values()),
        pool_bytes=pool_bytes,
        graph_bytes=graph_bytes,
        sizes=tuple(_warmup.sizes_of(states)),
        events=tuple(sorted((e for captured in states for e in captured.log.events), key=lambda e: e.at)),
        **total.items(),
    )


def sizes_seen(function: Any) -> dict[str, dict[int, int]]:
    """How often calls of a function with ``buckets=`` came with each size, by the name of the dimension, as
    ``{"batch": {1: 40, 3: 2}}``. The name is that of ``Dim``, or the argument's with the number of the dimension. Of
    the last 4,096 combinations of shapes. ``ladder`` makes a ladder of it.

    Raises ``AnnotationError`` for what is not captured, or has no buckets.
    """
    by_name: dict[str, dict[int, int]] = {}
    states = captured_states(function)
    if any(captured.sizes is None for captured in states):
        raise AnnotationError(f"{states[0].annotation.function} has no buckets=")
    for captured in states:
        for name, counts in captured.sizes.counts().items() if captured.sizes is not None else ():
            counts_of_sizes = by_name.setdefault(name, {})
            for size, count in counts.items():
                counts_of_sizes[size] = counts_of_sizes.get(size, 0) + count
    return {name: dict(sorted(counts.items())) for name, counts in by_name.items()}


def reset(function: Any = None) -> None:
    """Forget everything about a captured function, or about all: recordings, plans in memory, warnings, counters."""
    for captured in all_states() if function is None else captured_states(function):
        captured.reset()
    if function is None:
        lives.forget()
    else:
        begin_anew(function)


def release(function: Any = None) -> None:
    """Destroy recordings now; plans stay, so the next call records again without a watched run."""
    for captured in all_states() if function is None else captured_states(function):
        captured.release()


def save_plans(directory: str | os.PathLike[str]) -> int:
    """Write the plans of all captured functions to a directory, one JSON file each; gives their number."""
    found = [entry.plan for captured in all_states() for entry in captured.entries() if entry.plan is not None]
    return store.save_plans(Path(directory), found)


def load_plans(directory: str | os.PathLike[str]) -> LoadReport:
    """Use the plans in a directory from now on, as if this process had made them. Damaged or stale files are named."""
    return store.load_plans(Path(directory))
