"""Phases: what moves an entry from one to another, and what is dropped or told with it.

``enter`` is the one place that writes a phase. Where what is known of a key does not hold, ``forget`` drops it; the
``give_up_...`` functions leave the entry eager, with a plan that says why.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from capture.core.facts import GradientObstacle, GradientUse, SlowReplay, Verification
from capture.key.signature import Leaf
from capture.rules.compile_plan import compile_plan
from capture.runtime import payoff, planning
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry, Phase
from capture.runtime.verdict import GO_ON, Reply, Verdict
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree


def enter(captured: Captured, entry: Entry, phase: Phase) -> None:
    """The one place that moves an entry to a phase. Why one goes eager is said, or raised as the annotation asks."""
    entry.advance(phase)
    if phase == "eager" and entry.plan is not None:
        captured.report(entry.plan)


def give_up_slow(captured: Captured, entry: Entry, tree: Tree) -> None:
    """Have calls run eagerly, as replays of this entry are slower than the body. They are looked at again rarely."""
    timing, left = entry.payoff, entry.plain or entry  # of a forward pass, what stands for all calls again
    names, where = captured.optimizers.names_of_islands(), captured.annotation.defined_at
    recorded = [node.recording for node in entry.nodes if node.recording is not None]
    slow = SlowReplay(
        replay=timing.replay * 1e6, body=timing.body * 1e6, where=where, optimizers=names,
        operators=max((recording.num_ops for recording in recorded), default=0),
        breaks=max((len(recording.reads) for recording in recorded), default=0),
    )  # fmt: skip
    captured.log.add("drop", "replays take longer than the body")
    captured.budget.spend("drops", timing.loss * payoff.AFTER * 1e3, key=entry.key)
    forget(captured, entry, tree)
    left.payoff = payoff.Payoff()
    left.plan = compile_plan(captured.annotation, captured.bare_facts(slow_replay=slow))
    for lifted in [
        lifted_call for lifted_call in captured.lifted if lifted_call.entry is entry
    ]:  # each call has another key again
        captured.lifted.remove(lifted)
        captured.lifts_left, captured.hopeless = 0, left.plan
    enter(captured, left, "eager")


def load(captured: Captured, entry: Entry, leaves: Sequence[Leaf]) -> Phase:
    """Load a stored plan, if there is one. Gives the phase of a cold entry after that."""
    enter(captured, entry, planning.load(captured, entry, leaves))
    return entry.phase


def give_up_gradients(
    captured: Captured, entry: Entry, uses: Sequence[GradientUse], obstacle: GradientObstacle
) -> None:  # fmt: skip
    """Forward and backward cannot be recorded apart after all."""
    entry.retire()
    captured.clear_fast_paths()
    facts = captured.bare_facts(gradients=tuple(uses), gradient_obstacles=(obstacle,))
    entry.plan, entry.facts = compile_plan(captured.annotation, facts), None
    enter(captured, entry, "eager")


def settle(captured: Captured, entry: Entry, reply: Reply) -> None:
    """After a recording run: the plan is kept as it is now, or replaced."""
    if reply.refuted is not None:
        entry.asks_no_more = False
        entry.forget_arrays()
        enter(captured, entry, planning.replace(captured, entry, reply.refuted))
        if reply.refuted.is_branch and entry.backend is not None and entry.steadiness.is_lost:
            give_up_reads(captured, entry, tree_for(entry.backend, captured.pool.number))
    elif reply.verdict is Verdict.DONE and entry.plan_is_new:
        planning.save(captured, entry)


def give_up_reads(captured: Captured, entry: Entry, tree: Tree) -> Reply:
    """The values that the host reads do not come again: recordings of this body do not pay."""
    branches, (stops, replays) = entry.known_branches(), (entry.steadiness.stops, entry.steadiness.replays)
    facts = next((branch.facts for _, branch in branches), None)
    assert facts is not None
    forget(captured, entry, tree)
    why = f"what it reads is another value in call after call: {len(branches)} branches led to {replays} replays"
    captured.log.add("drop", f"{why} ({stops} stops)")
    entry.plan, entry.may_change = compile_plan(captured.annotation, evolve(facts, unsteady_reads=why)), False
    enter(captured, entry, "eager")
    return GO_ON


def _forget_shown(captured: Captured, entry: Entry) -> None:
    """What its key leaves out of Python state may be another constant from now on."""
    if captured.decisions is not None:
        captured.decisions.shown_for(entry.constants).clear()


def note_difference(captured: Captured, entry: Entry, tree: Tree, path: str, *, is_wrong: bool) -> None:
    """A recording that differs is forgotten; of a body that differs from itself it is said."""
    facts = captured.bare_facts(verification=Verification(path=path, deterministic=is_wrong))
    plan = compile_plan(captured.annotation, facts)
    if not is_wrong:
        captured.note_findings(plan)
        return
    forget(captured, entry, tree)
    entry.plan, entry.may_change = plan, False
    enter(captured, entry, "eager")


def forget(captured: Captured, entry: Entry, tree: Tree) -> None:
    """Drop all recordings of an entry, those of other threads at their next calls, and start it over."""
    for node in list(entry.nodes):
        tree.forget(node)
    entry.nodes.clear()
    if entry.region is not None:
        entry.region.retire()
        entry.without_region()
    captured.clear_fast_paths()
    entry.plan, entry.facts, entry.asks_no_more = None, None, False
    _forget_shown(captured, entry)
    entry.forget_arrays()
    entry.branches.clear()
    enter(captured, entry, "cold")
