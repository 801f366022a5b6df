"""Warm up: bring a captured function to replay without a trace in the caller's state."""

from __future__ import annotations

from typing import Any, Literal

from attrs import frozen

from capture import _config, _difference, _planning, _record, _watched
from capture._bind import Leaf, Unkeyable, key_of
from capture._call import Call
from capture._compile import compile_plan
from capture._entry import RETRIES, Entry
from capture._findings import Severity
from capture._plan import CapturePlan
from capture._runtime import Captured
from capture._tree import Tree
from capture._trees import tree_for

_ONE_RUN = "its collectives need the other ranks, so each warm-up runs the body once: warm up again, or call it"
Status = Literal["recorded", "known", "skipped"]


@frozen
class Outcome:
    """What became of one call. ``code`` is the rule's where a rule forbids the recording."""

    status: Status
    reason: str = ""
    code: str | None = None


def leaves_of(values: tuple[Any, ...]) -> list[Leaf]:
    """Dynamic leaves of bound values, in the order of the key."""
    leaves: list[Leaf] = []
    for value in values:
        try:
            key_of(value, leaves)
        except (Unkeyable, TypeError):
            continue
    return leaves


def warm_up(captured: Captured, values: tuple[Any, ...], *, say_limit: bool = True) -> Outcome:
    """Observe and record one call at the root of the tree, undoing both runs.

    Says why nothing is recorded as a call would: a warning once a reason, or ``UncapturableError``. An exception of
    the body comes out. ``say_limit=False``: the limit was said already.
    """
    if not _config.current().enabled:
        return Outcome("skipped", "captured functions are switched off (CAPTURE_ENABLED=0)")
    try:
        entry, leaves = captured.entry_of(values)
    except (Unkeyable, TypeError) as error:
        return _unkeyable(captured, values, str(error))
    call = captured.call(values, leaves)
    backend = captured.backend_of(entry, leaves)
    if backend is None or entry.phase == "eager":
        return _eager(captured, entry)
    tree = tree_for(backend)
    runs = captured.log.counters.body_runs
    outcome = _advance(captured, entry, call, tree, say_limit=say_limit)
    if captured.log.counters.body_runs == runs and any(one.plan and one.plan.collectives for one in captured.entries()):
        _keep_step(captured, call)
    return outcome


def _advance(captured: Captured, entry: Entry, call: Call, tree: Tree, *, say_limit: bool) -> Outcome:
    if _is_recorded(entry, tree):
        return Outcome("known")
    if not tree.end_path("warm-up"):
        return Outcome("skipped", "outputs of the step so far are still held and cannot leave the pool")
    if tree.root.counts.get(captured.number, 0) >= captured.annotation.max_recordings:
        return _limit_reached(captured, entry, call, tree, say=say_limit)
    outcome = _bring_to_replay(captured, entry, call, tree)
    tree.end_path("warm-up")
    return outcome


def _bring_to_replay(captured: Captured, entry: Entry, call: Call, tree: Tree) -> Outcome:
    for _ in range(2 * RETRIES + 3):  # each run either brings the entry on or is one that differs from the last
        call = captured.call(call.values, call.leaves, entry)
        phase = _planning.load(captured, entry, call.leaves) if entry.phase == "cold" else entry.phase
        if phase == "cold":
            if _observe_once(captured, entry, call):
                return Outcome("skipped", _ONE_RUN)
        elif phase == "eager":
            return _eager(captured, entry)
        else:
            entry.warmups_left, entry.phase = 0, "ready"
            _record.record(captured, entry, call, tree, tree.pattern(call.leaves), undo=True)
            together = entry.plan is not None and entry.plan.collectives
            if together and tree.backend.name != "cpu":  # it was captured there, and nothing has run
                _keep_step(captured, call)
            if _is_recorded(entry, tree):
                return Outcome("recorded")
            if together:
                return Outcome("skipped", _ONE_RUN)
    return _eager(captured, entry) if entry.phase == "eager" else Outcome("skipped", "every run differs from the last")


def _is_recorded(entry: Entry, tree: Tree) -> bool:
    """A recording starts a path; one below another function is of no use to a call that comes first."""
    return any(number == entry.number and set(pattern) <= {None} for number, pattern in tree.root.children)


def _keep_step(captured: Captured, call: Call) -> None:
    """Run the body, undone, as often as the other ranks do in this warm-up: they wait in its collectives."""
    watched, _ = _planning.watch(captured, call, undo=True, trial=True)
    _watched.undo(watched)


def _observe_once(captured: Captured, entry: Entry, call: Call) -> bool:
    """Tells whether the body communicates."""
    watched, described = _planning.watch(captured, call, undo=True, trial=True)
    _watched.undo(watched)
    facts = _planning.compared(entry, described.facts, watched.watch.notes.lines)
    _planning.take(captured, entry, facts, watched, described)
    return bool(facts.collectives)


def _eager(captured: Captured, entry: Entry) -> Outcome:
    """The plan says eager: said if it was not said yet, raised where the annotation asks for it."""
    if entry.plan is None:
        return Outcome("skipped", "this key cannot be recorded")
    captured.report(entry.plan)
    return _because(entry.plan)


def _because(plan: CapturePlan) -> Outcome:
    findings = plan.findings_at_least(Severity.EAGER)
    return Outcome("skipped", findings[0].what, findings[0].code) if findings else Outcome("skipped", "it runs eagerly")


def _limit_reached(captured: Captured, entry: Entry, call: Call, tree: Tree, *, say: bool) -> Outcome:
    """Nothing runs, and a key that nothing is known about is forgotten, as many would count as ever new ones."""
    limit = _difference.difference(captured, entry, call, tree, None)
    plan = compile_plan(captured.annotation, captured.bare_facts(limit=limit))
    family = captured.families.get(entry.key[:-1])
    if entry.plan is None and family is not None and list(family.entries.values()) == [entry]:
        del captured.families[entry.key[:-1]]
    if say:
        captured.report(plan)
    return _because(plan)


def _unkeyable(captured: Captured, values: tuple[Any, ...], reason: str) -> Outcome:
    leaf = captured.call(values, []).unkeyable(reason)
    plan = compile_plan(captured.annotation, captured.bare_facts(opaque=(leaf,)))
    captured.report(plan)
    return _because(plan)
