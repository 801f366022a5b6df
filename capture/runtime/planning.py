"""Planning: how an entry gets its plan, from the store or from watched runs, and how it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from capture import _config, _observe, _ranks, _store, _watched
from capture._autograd import Region
from capture._bind import Key
from capture._call import Call
from capture._collectives import registers_segments
from capture._compare import compare
from capture._compile import compile_plan
from capture._describe import Described, describe
from capture._entry import RETRIES, Entry, Phase, may_settle
from capture._errors import UncapturableError
from capture._facts import Facts
from capture._findings import Severity
from capture._follow import expected
from capture._lock import capture_lock
from capture._plan import CapturePlan
from capture._torch_private_distributed import passes_measured
from capture._tree import Tree
from capture._trees import tree_for
from capture._watched import Watched
from capture.backends import backend_for

if TYPE_CHECKING:
    from capture._runtime import Captured


def load(captured: Captured, entry: Entry, leaves: Sequence[Any]) -> Phase:
    """Take the plan another process made, if there is one; it is checked by the recording."""
    if entry.region is None and torch.is_grad_enabled() and any(_needs_gradient(leaf) for leaf in leaves):
        return entry.phase  # only a watched run tells whether a graph through staged arguments would be left
    if _config.current().skip_warmup and entry.trusts_store:
        entry.phase = "ready"
        return entry.phase
    if not entry.trusts_store:
        return entry.phase
    if not captured.keeps_plans:
        return entry.phase
    plan = _store.load(captured.annotation, captured.function, _stored_key(entry), captured.log)
    if plan is None or (plan.collectives and registers_segments()):
        return entry.phase
    entry.plan = plan
    captured.log.counters.plans_loaded += 1
    if plan.outcome == "record" and plan.collectives:
        entry.phase, entry.warmups_left = "warm", 1  # makes the connections that a capture cannot make
        captured.note_findings(plan)
    elif plan.outcome == "eager":
        entry.phase = "eager"
        captured.report(plan)
    else:
        entry.phase = "ready"
        captured.note_findings(plan)
    return entry.phase


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _stored_key(entry: Entry) -> Key:
    return entry.key if entry.region is None else (*entry.key, "forward")


def watch(captured: Captured, call: Call, *, undo: bool, trial: bool = False) -> tuple[Watched, Described]:
    """One watched eager run. ``trial``: what a body did that raises is undone, too."""
    captured.log.counters.observations += 1
    captured.log.counters.body_runs += 1
    with capture_lock, captured.log.timed("observe"):
        with captured.optimizers.watching():
            watched = _watched.run_watched(call, _observe.Watch(undo=undo))
        captured.optimizers.note(watched.before, (call.receiver, *call.values))
        captured.optimizers.note_gradients(watched)
        if watched.error is not None:
            if trial:
                _watched.undo(watched)
            raise watched.error
        return watched, describe(watched)


def observe(captured: Captured, entry: Entry, call: Call, tree: Tree) -> Any:
    """Watch one eager run, make a plan of what it showed, and give its result."""
    undoable = captured.annotation.fallback == "error" or captured.annotation.rng == "forbid"
    with _ranks.exchange(captured, entry) as exchange:
        watched, described = watch(captured, call, undo=undoable)
        facts = compared(entry, described.facts, watched.watch.notes.lines)
        facts = _ranks.agreed(exchange, captured, entry, facts)
    tree = _on_its_device(entry, facts, tree)
    if _shares_with_state(captured, facts):  # says nothing about calls that do not
        entry.overlapping = entry = entry.overlapping or Entry((*entry.key, "overlaps state"))
    try:
        take(captured, entry, facts, watched, described)
    except UncapturableError:
        _watched.undo(watched)
        raise
    if entry.phase == "warm":
        tree.note_warm(captured, [leaf.value for leaf in described.outputs if leaf.kind == "fresh"])
    elif entry.phase == "eager":
        captured.log.counters.eager_calls += 1
    return watched.result


def _on_its_device(entry: Entry, facts: Facts, tree: Tree) -> Tree:
    """A body may work on a device that none of its arguments tells of, through a module it names."""
    devices = [device for device in facts.devices if not device.startswith(("cpu", "meta"))]
    if len(devices) != 1 or devices[0] == tree.backend.name:
        return tree
    backend = backend_for(torch.device(devices[0]))
    if backend is None:
        return tree
    entry.backend = backend
    return tree_for(backend)


def forget_stored(entry: Entry) -> None:
    """A recording made without a watched run did not come out as expected: begin with a watched run after all."""
    entry.phase, entry.plan, entry.trusts_store = "cold", None, False


def _always_unsettled(captured: Captured, plan: CapturePlan) -> bool:
    """State that the body names and changes makes a new key of every call, so that no entry is seen twice."""
    replays = captured.log.counters.replays
    for key in {(finding.code, finding.path) for finding in plan.findings_at_least(Severity.EAGER)}:
        count, then = captured.unsettled.get(key, (0, replays))
        count = count + 1 if replays == then else 1  # other keys settle: objects are set up at their first use
        captured.unsettled[key] = count, replays
        if count > RETRIES:
            captured.hopeless = plan
            return True
    return False


def _shares_with_state(captured: Captured, facts: Facts) -> bool:
    groups = {one.alias_group for one in facts.placeholders if one.kind == "argument"} - {None}
    shared = any(one.kind == "implicit" and one.alias_group in groups for one in facts.placeholders)
    return shared and compile_plan(captured.annotation, facts).outcome == "eager"


def take(captured: Captured, entry: Entry, facts: Facts, watched: Watched, described: Described) -> None:
    """Make and keep the plan of a watched run; warns, or raises as the annotation asks, if it is an eager one."""
    entry.note_reads(watched)
    if watched.once and entry.settling < RETRIES:
        captured.log.add("plan", f"{watched.once}, which is done once: watched again")
        entry.settling += 1
        return
    plan = entry.plan = compile_plan(captured.annotation, facts)
    if facts.gradients and plan.outcome == "record":
        begin_region(captured, entry, plan, watched.call.leaves)
        return
    entry.facts = facts
    entry.expected = None if facts.drifts or facts.sequence_change else expected(watched, described)
    if plan.outcome == "record":
        entry.phase = "warm"
        entry.warmups_left = max(captured.annotation.warmup - 1, passes_measured(watched.before.modules))
        captured.note_findings(plan)
        save(captured, entry)
    elif may_settle(plan) and entry.differing_runs < RETRIES and not _always_unsettled(captured, plan):
        entry.differing_runs += 1  # what a first call sets up once is no reason; watch another one
    else:
        entry.phase = "eager"
        save(captured, entry)
        captured.report(plan)


def begin_region(captured: Captured, entry: Entry, plan: CapturePlan, leaves: Sequence[Any]) -> None:
    """The results need gradients and nothing else is in the way: what is watched and recorded from now on is the
    forward pass, and its backward pass beside it."""
    captured.note_findings(plan)
    captured.log.add("plan", "results need gradients: forward and backward are recorded apart")
    entry.region = Region(captured, entry, leaves)
    entry.phase, entry.plan, entry.facts, entry.differing_runs = "cold", None, None, 0


def compared(entry: Entry, facts: Facts, lines: Sequence[Any]) -> Facts:
    """Facts with the differences to the run before."""
    if entry.facts is None:
        return facts
    drifts, change = compare(entry.facts, facts, lines)
    return evolve(facts, drifts=drifts, sequence_change=change, runs=entry.facts.runs + 1)


def _is_of_this_run(facts: Facts | None) -> bool:
    """What other ranks or the settings of NCCL say holds for this run of the program alone."""
    return facts is not None and (facts.dissent is not None or any(one.registers_segments for one in facts.collectives))


def save(captured: Captured, entry: Entry) -> None:
    """Keep the plan for other processes."""
    if entry.plan is not None and captured.keeps_plans and not _is_of_this_run(entry.facts):
        entry.plan = _store.save(captured.annotation, captured.function, _stored_key(entry), entry.plan, captured.log)
    entry.plan_is_new = False


def replace(captured: Captured, entry: Entry, facts: Facts, plan: CapturePlan, reason: str) -> None:
    """A run that was to be a recording was none, or not as planned. Look again where it may settle, else go eager."""
    captured.log.add("drop", reason)
    if facts.gradients and plan.outcome == "record":  # recorded without a watched run; that is needed after all
        forget_stored(entry)
        entry.facts = None
        return
    entry.facts, entry.plan, entry.plan_is_new, entry.expected = facts, plan, True, None
    entry.differing_runs += 1
    if entry.differing_runs <= RETRIES and may_settle(plan):
        entry.phase = "warm" if plan.outcome == "record" else "cold"
        return
    entry.phase = "eager"
    save(captured, entry)
    captured.report(plan)
