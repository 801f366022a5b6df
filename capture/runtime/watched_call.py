"""Watched calls: a call whose one run of the body is watched, or recorded, and what that takes from the budget."""

from __future__ import annotations

import time
from typing import Any

from capture.core.errors import UncapturableError
from capture.core.facts import Facts
from capture.observe import run
from capture.runtime import eviction, planning, record
from capture.runtime.captured import Captured
from capture.runtime.eager_call import run_eagerly
from capture.runtime.entry import Entry
from capture.runtime.phases import enter, give_up_reads, settle
from capture.runtime.state_changes import cuts_steps, takes_gradients
from capture.runtime.training_region import Region
from capture.runtime.verdict import Verdict
from capture.state import body_run
from capture.state.call import Call
from capture.tree.node import Pattern
from capture.tree.tree import Tree


def observe_call(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Watch one eager run, plan by what it showed, and give its result."""
    begin = time.thread_time()
    tree.note_chain(captured, bound.leaves)
    try:
        observed = planning.observe(captured, entry, bound)
    except BaseException as error:
        captured.log.counters.watched_calls += is_own(error)
        raise
    finally:
        captured.budget.spend("observations", (time.thread_time() - begin) * 1e3, key=entry.key)
    captured.budget.note_operators(observed.facts.num_ops)
    tree = planning.on_its_device(captured, entry, observed.facts, tree)
    if planning.shares_with_state(captured, observed.facts):  # says nothing about calls that do not
        entry.overlapping = entry = entry.overlapping or Entry((*entry.key, "overlaps state"))
    if _changes_keys(captured, entry, bound, tree, observed.facts):
        captured.log.counters.watched_calls += 1
        return observed.watched.result
    try:
        plan_by(captured, entry, observed)
    except UncapturableError:
        run.undo(observed.watched)
        raise
    if entry.phase == "warm":
        fresh = [leaf.value for leaf in observed.described.outputs if leaf.kind == "fresh"]
        tree.note_warm(captured, fresh)
    if entry.phase == "eager":
        captured.log.counters.eager_calls += 1
    else:
        captured.log.counters.watched_calls += 1
    return observed.watched.result


def _changes_keys(
    captured: Captured, entry: Entry, bound: Call, tree: Tree, facts: Facts, *, was_stopped: bool = False
) -> bool:  # fmt: skip
    """Whether calls are told apart by other things from now on, so that no entry of theirs will be met again."""
    is_known = takes_gradients(captured, entry, bound, tree, facts)
    return is_known or cuts_steps(captured, entry, tree, facts, was_stopped=was_stopped)


def is_own(error: BaseException) -> bool:
    """Whether the body of this thread's call raised this error."""
    run = body_run.current()
    return run is not None and run.error is error


def plan_by(captured: Captured, entry: Entry, observed: planning.Observed) -> None:
    """Plan by what a watched run showed."""
    phase = planning.take(captured, entry, observed)
    if observed.facts.reads or entry.times_read:
        entry.times_read[observed.facts.reads] += 1
    if phase == "eager" and observed.facts.reads and entry.nodes:  # other branches are recorded
        assert entry.plan is not None
        captured.report(entry.plan)
        return
    if phase is not None:
        enter(captured, entry, phase)
        return
    # Nothing is in the way but that results need gradients. What is watched and recorded from now on is the forward
    # pass, and its backward pass beside it.
    assert entry.plan is not None
    captured.note_findings(entry.plan)
    captured.log.add("plan", "results need gradients: forward and backward are recorded apart")
    assert entry.backend is not None
    region = Region(captured, entry.backend, observed.watched.call.leaves, observed.facts, entry.payoff)
    region.look_for_higher_order(observed.watched.result)
    entry.plan = None
    entry.with_region(region)


def is_read_once_more(entry: Entry, *, executes: bool) -> bool:
    """Whether this call is watched, not recorded. ``executes``: a recording run of this engine does."""
    return not (entry.nodes or entry.has_read_again or executes)


def read_once_more(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Watch another run: to capture one that reads what no run read before, where a capture executes nothing, would
    have the body's Python run twice in this call."""
    result = observe_call(captured, entry, bound, tree)
    if entry.facts is not None and entry.facts.reads and not entry.has_read_again:
        entry.steadiness.note_stop(entry.facts.reads[-1], is_new=not captured.takes_last_of(entry.facts.reads))
        if entry.steadiness.is_lost:
            give_up_reads(captured, entry, tree)
    return result


def record_call(captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern) -> Any:
    """The result of a call that is recorded, or was to be."""
    begin, before, kept = time.thread_time(), captured.log.counters.recordings, False
    costs = not entry.is_proven
    nbytes = tree.pool.reserved_bytes()
    try:
        reply = record.record(captured, entry, bound, tree, pattern)
        kept = captured.log.counters.recordings > before
    except BaseException as error:
        captured.log.counters.recorded_calls += is_own(error)
        raise
    finally:
        ms = (time.thread_time() - begin) * 1e3
        if costs or not kept:
            captured.budget.spend("recordings" if kept else "drops", ms, key=entry.key)
    eviction.keep_within_limits(tree, entry, nbytes)
    refuted = None if reply.verdict is Verdict.OBSERVE or reply.body_first else reply.refuted
    is_done = reply.verdict is Verdict.DONE
    if refuted is not None and _changes_keys(captured, entry, bound, tree, refuted.facts, was_stopped=not is_done):
        if not is_done:
            return run_eagerly(captured, bound, reply.reason)
        captured.log.counters.recorded_calls += 1
        return reply.result
    if reply.verdict is Verdict.OBSERVE and reply.refuted is not None:
        reads = reply.refuted.facts.reads
        entry.steadiness.note_stop(reads[-1], is_new=not captured.takes_last_of(reads))
        if entry.steadiness.is_lost:
            give_up_reads(captured, entry, tree)
            return run_eagerly(captured, bound, "what the host reads does not come again")
        return observe_call(captured, entry, bound, tree)
    if reply.verdict is Verdict.OBSERVE:
        enter(captured, entry, planning.forget_stored(entry))
        return observe_call(captured, entry, bound, tree)
    if reply.interrupt is None and not reply.body_first:
        settle(captured, entry, reply)
    if reply.verdict is not Verdict.EAGER:
        captured.log.counters.recorded_calls += 1
        return reply.result
    result = run_eagerly(captured, bound, reply.reason)
    if reply.interrupt is not None:
        raise reply.interrupt
    if reply.body_first:
        settle(captured, entry, reply)
    return result
