"""Undone runs: watch and record a call without giving a result or changing anything, for ``warmup``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from capture.core.facts import Facts
from capture.core.findings import Severity
from capture.core.plan import CapturePlan
from capture.runtime import eviction, given_numbers, planning, record
from capture.runtime.captured import Captured
from capture.runtime.decisions import hold
from capture.runtime.entry import RETRIES, Entry
from capture.runtime.limits import WAITS, too_large_plan
from capture.runtime.phases import enter, load, settle
from capture.runtime.verdict import Outcome, Verdict
from capture.runtime.watched_call import plan_by
from capture.state.call import Call
from capture.tree.tree import Tree

_ONE_RUN = "its collectives need the other ranks, so each warm-up runs the body once: warm up again, or call it"


def bring_to_replay(
    captured: Captured, entry: Entry, call: Call, tree: Tree, is_recorded: Callable[[], bool], *,
    with_gradients: bool = True,
) -> Outcome:  # fmt: skip
    """Watch and record a call, and undo both runs."""
    for _ in range(2 * RETRIES + 3):  # each run either brings the entry on or is one that differs from the last
        entry = entry.in_use()
        if entry.region is not None and not with_gradients:
            return Outcome("skipped", "its results need gradients")
        if entry.region is not None and entry.region.has_to_wait():
            return Outcome("skipped", WAITS)
        call = captured.call(call.values, call.leaves, entry)
        phase = load(captured, entry, call.leaves) if entry.phase == "cold" else entry.phase
        if phase == "cold":
            facts = observe_undone(captured, entry, call)
            if facts.collectives:
                return Outcome("skipped", _ONE_RUN)
            if not (with_gradients or all(island.is_undoable for island in facts.islands)):
                return Outcome("skipped", "an island runs once a call")
        elif phase == "eager":
            return stays_eager(captured, entry)
        else:
            too_large = eviction.forecast(captured, entry, call, tree)
            if too_large is not None:
                plan = too_large_plan(captured, too_large)
                captured.report(plan)
                return because(plan)
            if hold(captured, entry, call) is not Verdict.GO_ON:
                return Outcome("skipped", "more than some answers comes of a number")
            make = functools.partial(record_undone, captured, entry, call, tree)
            given_numbers.completed(captured, entry, call, tree, tree.pattern(call.leaves), make)
            together = entry.plan is not None and entry.plan.collectives
            if together and not tree.backend.executes_recording_runs:  # it was captured, and nothing has run
                run_undone(captured, call)
            if is_recorded():
                return Outcome("recorded")
            if together:
                return Outcome("skipped", _ONE_RUN)
    eager = entry.phase == "eager"
    return stays_eager(captured, entry) if eager else Outcome("skipped", "every run differs from the last")


def stays_eager(captured: Captured, entry: Entry) -> Outcome:
    """The plan says eager: said if it was not said yet, raised where the annotation asks for it."""
    if entry.plan is None:
        return Outcome("skipped", "this key cannot be recorded")
    captured.report(entry.plan)
    return because(entry.plan)


def because(plan: CapturePlan) -> Outcome:
    """What a plan gives as the reason."""
    findings = plan.findings_at_least(Severity.EAGER)
    return Outcome("skipped", findings[0].what, findings[0].code) if findings else Outcome("skipped", "it runs eagerly")


def observe_undone(captured: Captured, entry: Entry, bound: Call) -> Facts:
    """Watch one eager run, plan by what it showed, and undo it."""
    observed = planning.observe_undone(captured, entry, bound)
    plan_by(captured, entry, observed)
    return observed.facts


def record_undone(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> None:
    """Record a call without a result, and undo the run."""
    entry.warmups_left = 0
    enter(captured, entry, "ready")
    nbytes = tree.pool.reserved_bytes()
    reply = record.record(captured, entry, bound, tree, tree.pattern(bound.leaves), undo=True)
    eviction.keep_within_limits(tree, entry, nbytes)
    if reply.verdict is Verdict.OBSERVE:
        enter(captured, entry, planning.forget_stored(entry))
    else:
        settle(captured, entry, reply)


def run_undone(captured: Captured, bound: Call) -> None:
    """Run the body and undo that."""
    planning.watch_undone(captured, bound)
