"""Planning: how an entry gets its plan, from the store or from watched runs, and how it is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from capture.core import config
from capture.core.data import frozen
from capture.core.facts import Effect, EffectKind, Facts, Unkeyed
from capture.core.findings import BRANCHING, Severity
from capture.core.interrupts import guarded
from capture.core.plan import CapturePlan
from capture.distributed import rank_agreement
from capture.engines.registry import backend_for
from capture.key import objects, pytree
from capture.key.left_objects import PlaceKey, key_of_place
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Key
from capture.observe import dispatch_mode, islands, run
from capture.observe.capture_lock import locked
from capture.observe.collectives import registers_segments
from capture.observe.described import DescribedRun
from capture.observe.expectation import expected
from capture.observe.facts_builder import describe, uses_unwritten
from capture.observe.result_objects import are_of_this_process
from capture.observe.run import ObservedRun
from capture.plan_cache import store
from capture.rules.compile_plan import compile_plan
from capture.runtime import branches
from capture.runtime.captured import Captured
from capture.runtime.entry import RETRIES, Entry, Phase
from capture.runtime.verdict import Refuted
from capture.state.call import Call
from capture.state.snapshot import Change
from capture.torch_private.distributed import passes_measured
from capture.torch_private.subclasses import unseen
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree


@unseen
def load(captured: Captured, entry: Entry, leaves: Sequence[Any]) -> Phase:
    """Take the plan another process made, if there is one; it is checked by the recording. Gives the phase to enter."""
    if entry.region is None and torch.is_grad_enabled() and any(_needs_gradient(leaf) for leaf in leaves):
        return entry.phase  # only a watched run shows whether anything would be left to replay with staged arguments
    if config.current().skip_warmup and entry.trusts_store:
        return "ready"
    if not entry.trusts_store or not captured.keeps_plans or entry.said_eager is not None:
        return entry.phase
    plan = store.load(captured.annotation, captured.function, _stored_key(entry), captured.log)
    if plan is None or (plan.collectives and registers_segments()):
        return entry.phase
    if plan.outcome == "record" and any(finding.code in BRANCHING for finding in plan.findings):
        return entry.phase  # it describes one branch: each process finds out which ones its calls take
    captured.log.counters.plans_loaded += 1
    if plan.outcome == "eager" and not store.is_looked_at(plan):
        entry.said_eager = plan  # its reasons may be gone: one run of this process is watched
        return entry.phase
    entry.plan = plan
    if plan.outcome == "eager":
        return "eager"
    captured.note_findings(plan)
    if plan.collectives:
        entry.warmups_left = 1  # opens the connections that a capture cannot open
        return "warm"
    return "ready"


def _needs_gradient(leaf: Any) -> bool:
    return issubclass(type(leaf), torch.Tensor) and leaf.requires_grad


def _stored_key(entry: Entry) -> Key:
    return entry.key if entry.region is None else (*entry.key, "forward")


def watch(captured: Captured, call: Call, *, undo: bool) -> tuple[ObservedRun, DescribedRun]:
    """One watched eager run. ``undo``: what it changes is kept, so that it can be undone."""
    captured.log.counters.observations += 1
    captured.log.counters.body_runs += 1
    return locked(_watch, captured, call, undo)


def watch_undone(captured: Captured, call: Call, *, counts: bool = True) -> tuple[ObservedRun, DescribedRun]:
    """One watched eager run that leaves no trace, whatever ends it. ``counts``: as an observation."""
    captured.log.counters.observations += counts
    captured.log.counters.body_runs += 1
    answers = islands.pending()

    def undo_stopped(errors: Sequence[BaseException]) -> None:
        run.undo_stopped(call, errors)
        islands.answer_again(answers)

    found: tuple[ObservedRun, DescribedRun] = locked(guarded, _watch_and_undo, (captured, call, answers), undo_stopped)
    return found


def _watch_and_undo(
    captured: Captured, call: Call, answers: list[islands.Outcome]
) -> tuple[ObservedRun, DescribedRun]:  # fmt: skip
    watched, described = _watch(captured, call, undo=True, forgets=False)
    run.undo(watched)
    islands.answer_again(answers)
    call.forget_run()
    return watched, described


def _watch(
    captured: Captured, call: Call, undo: bool, forgets: bool = True
) -> tuple[ObservedRun, DescribedRun]:  # fmt: skip
    with captured.log.timed("observe"):
        with captured.optimizers.watching():
            watched = run.run_watched(call, dispatch_mode.ObserveMode(undo=undo))
        if forgets:
            call.forget_run()
        captured.shares_casts = captured.shares_casts or watched.shares_casts
        captured.optimizers.search(watched.before, call.function, (call.receiver, *call.values))
        captured.optimizers.note_gradients(*watched.gradient_uses())
        on_cpu = all(device.startswith(("cpu", "meta")) for device in watched.watch.trace.devices)
        given = {type(value) for value in (call.receiver, *call.values, *[leaf for _, leaf in call.all_leaves()])}
        if captured.unreached.search(watched.before, watched.ran, given, runs_operators=on_cpu):
            watched.once = watched.once or "functions that ran were found in the hands of a library"
        if watched.error is not None:
            error, watched.error = watched.error, None
            try:
                raise error
            finally:
                del error  # which has this frame
        if watched.watch.fault is not None:
            raise watched.watch.fault
        _note_changed(captured, watched)
        described = describe(watched)
        if uses_unwritten(watched, described):
            captured.by_mode, watched.once = True, watched.once or "memory that no operator writes was used"
        return watched, described


def _note_changed(captured: Captured, watched: ObservedRun) -> None:
    """Note in which containers and objects the body changed something, other than by way of an argument, and where it
    left objects."""
    if not watched.changed:
        return
    captured.named.tell_by_content(_left_in(watched.changed), captured.receiver)
    arguments = {*watched.call.binder.names, *watched.call.named_values()}
    places = [
        change for change in watched.changed
        if change.source.kind != "global" and [*change.source.chain()][-1].path not in arguments
    ]  # fmt: skip
    holders = [change.members.container if change.members else change.source.holder for change in places]
    found = {id(one): one for one in holders if pytree.is_container(one) or objects.is_plain(type(one))}
    if not found.keys() <= captured.changed.keys():
        others = [item for item in captured.changed.items() if item[0] not in found]
        captured.changed = dict([*others, *found.items()][-_MOST_CHANGED:])


_MOST_CHANGED = 32  # they are kept alive


def _left_in(changes: Iterable[Change]) -> Iterator[PlaceKey]:
    """Places in which a body left another object than was there, and those of the lists and dicts that they are in."""
    for change in changes:
        kind = type(change.after)
        if change.container or kind in PLAIN_TYPES or issubclass(kind, torch.Tensor):
            continue
        for place in change.source.chain():
            yield key_of_place(place.holder, place.name)
            if place.kind != "item" or type(place.holder) not in (list, dict):
                break


@frozen(eq=False)
class Observed:
    """A watched run, and its facts: those of all ranks, with the differences to the run before."""

    watched: ObservedRun
    described: DescribedRun
    facts: Facts


def observe(captured: Captured, entry: Entry, call: Call) -> Observed:
    """Watch one eager run, and hear the other ranks."""
    undoable = captured.annotation.fallback == "error" or captured.annotation.rng == "forbid"
    with rank_agreement.exchange(captured, entry) as exchange:
        watched, described = watch(captured, call, undo=undoable)
        _note_memory(entry, watched)
        facts = _compared(captured, entry, watched, described)
        return Observed(watched, described, rank_agreement.agreed(exchange, captured, entry, facts))


def observe_undone(captured: Captured, entry: Entry, call: Call) -> Observed:
    """As ``observe``, but the run is undone and other ranks are not asked."""
    watched, described = watch_undone(captured, call)
    _note_memory(entry, watched)
    return Observed(watched, described, _compared(captured, entry, watched, described))


def _note_memory(entry: Entry, watched: ObservedRun) -> None:
    if entry.backend is not None and entry.backend.name in watched.watch.trace.memory:
        entry.needs = max(entry.needs, watched.watch.trace.memory[entry.backend.name].peak)


def _compared(captured: Captured, entry: Entry, watched: ObservedRun, described: DescribedRun) -> Facts:
    """The run, compared with the one before it that took the same branch."""
    facts = branches.followed(captured, entry, described.facts)
    entry.turn_to(facts.reads)
    return entry.compared(facts, watched.watch.trace.lines)


def on_its_device(captured: Captured, entry: Entry, facts: Facts, tree: Tree) -> Tree:
    """A body may work on a device that none of its arguments tells of, through a module it names."""
    devices = [device for device in facts.devices if not device.startswith(("cpu", "meta"))]
    if len(devices) != 1 or devices[0] == tree.backend.name:
        return tree
    backend = backend_for(torch.device(devices[0]))
    if backend is None:
        return tree
    entry.backend = backend
    return tree_for(backend, captured.pool.number)


def _always_unsettled(captured: Captured, plan: CapturePlan) -> bool:
    """Whether state that the body names and changes makes a new key of every call, so that no entry is seen twice."""
    replays = captured.log.counters.replays
    for key in {(finding.code, finding.path) for finding in plan.findings_at_least(Severity.EAGER)}:
        count, then = captured.unsettled.get(key, (0, replays))
        count = count + 1 if replays == then else 1  # other keys settle: objects are set up at their first use
        captured.unsettled[key] = count, replays
        if count > RETRIES:
            captured.hopeless = plan
            return True
    return False


def shares_with_state(captured: Captured, facts: Facts) -> bool:
    """Whether an argument shares memory with Python state, and for that alone the body cannot be recorded."""
    groups = {placeholder.alias_group for placeholder in facts.placeholders if placeholder.kind == "argument"} - {None}
    shared = any(
        placeholder.kind == "implicit" and placeholder.alias_group in groups for placeholder in facts.placeholders
    )
    return shared and compile_plan(captured.annotation, facts).outcome == "eager"


def take(captured: Captured, entry: Entry, observed: Observed) -> Phase | None:
    """Make and keep the plan of a watched run. Gives the phase to enter; None: nothing is in the way but that results
    need gradients."""
    watched, facts = observed.watched, observed.facts
    if watched.once and entry.settling < RETRIES:  # before its code is looked at: a compiler's is most of torch
        captured.log.add("plan", f"{watched.once}, which is done once: watched again")
        entry.settling += 1
        return entry.phase
    obstacle, changed = locked(  # else some of what it reads may be another thread's stand-ins
        entry.note_reads, watched, observed.described, captured.recent_reads
    )
    if entry.read is not None and not entry.read.is_of_one_run:
        captured.recent_reads.add(entry.read)
    if changed is not None:
        obstacle_of_islands = f"changes {changed}, which the body reads"
        facts = evolve(
            facts, islands=tuple(evolve(island, obstacle=obstacle_of_islands, fix="order") for island in facts.islands)
        )
    captured.replacements.latest = entry.places
    if entry.places.early and not _tells_keys(entry) and entry.settling < RETRIES:
        captured.log.add("plan", "the next run tells which members of a dict the body looks up: watched again")
        entry.settling += 1
        return entry.phase
    if obstacle is not None:
        name, path = obstacle
        facts = evolve(facts, unkeyed=(*facts.unkeyed, Unkeyed(name=name, kind="answer", paths=(path,), where=None)))
    plan = entry.plan = compile_plan(captured.annotation, facts)
    if facts.gradients and plan.outcome == "record":
        return None
    entry.facts = facts
    captured.note_form(entry, facts)
    entry.expected = None if facts.drifts or facts.sequence_change else expected(watched, observed.described)
    if plan.outcome == "record":
        entry.warmups_left = max(captured.annotation.warmup - 1, passes_measured(watched.before.modules))
        captured.note_findings(plan)
        save(captured, entry)
        return "warm"
    confirmed = entry.said_eager is not None and _says_no_more(plan, entry.said_eager)
    if plan.may_settle and entry.may_differ_again and not confirmed and not _always_unsettled(captured, plan):
        entry.differing_runs += 1  # what a first call sets up once is no reason; watch another one
        return entry.phase
    save(captured, entry)
    return "eager"


def _tells_keys(entry: Entry) -> bool:
    """Whether a recording run tells which keys code looks up. One that only captures notes no code."""
    return entry.backend is None or entry.backend.executes_recording_runs


def _says_no_more(plan: CapturePlan, known: CapturePlan) -> bool:
    """Whether another process found these reasons to be eager, after as many runs as it takes."""
    reasons = {(one.code, one.path) for one in known.findings_at_least(Severity.EAGER)}
    return all((one.code, one.path) in reasons for one in plan.findings_at_least(Severity.EAGER))


def _is_of_this_run(facts: Facts | None) -> bool:
    """Whether the reasons hold for this run of the program alone: they come from other ranks, the settings of NCCL or
    the identity of objects."""
    if facts is None or facts.dissent is not None or are_of_this_process(facts):
        return facts is not None
    return any(collective.registers_segments for collective in facts.collectives)


def save(captured: Captured, entry: Entry) -> None:
    """Keep the plan for other processes."""
    if entry.plan is not None and captured.keeps_plans and not captured.unreached and not _is_of_this_run(entry.facts):
        entry.plan = store.save(captured.annotation, captured.function, _stored_key(entry), entry.plan, captured.log)
    entry.plan_is_new = False


def replace(captured: Captured, entry: Entry, refuted: Refuted) -> Phase:
    """A run that was to be a recording was none, or not as planned. Gives the phase to enter: look again where it may
    settle, else go eager."""
    facts, plan = refuted.facts, refuted.plan
    captured.log.add("drop", refuted.reason)
    if facts.gradients and plan.outcome == "record":  # recorded without a watched run; that is needed after all
        entry.facts = None
        return forget_stored(entry)
    if entry.facts is not None and entry.differing_runs >= RETRIES and plan.outcome == "record":
        facts = evolve(facts, effects=_unsteady(entry.facts, facts))
        plan = compile_plan(captured.annotation, facts)
    entry.facts, entry.plan, entry.plan_is_new, entry.expected = facts, plan, True, None
    if refuted.is_branch:
        is_new = not captured.takes_last_of(facts.reads)
        entry.steadiness.note_stop(next(iter(facts.reads[-1:]), "[]"), is_new=is_new)
        captured.note_findings(plan)
        return "ready" if any(plan.outcome == "record" for plan in entry.plans()) else "eager"
    entry.differing_runs += 1
    if entry.differing_runs <= RETRIES and plan.may_settle:
        return "warm" if plan.outcome == "record" else "cold"
    save(captured, entry)
    return "eager"


def _unsteady(before: Facts, now: Facts) -> tuple[Effect, ...]:
    """The effects, of which those that only one of two runs had are none that a replay can do again."""
    kind: dict[EffectKind, EffectKind] = {"value": "python", "count": "python", "members": "container"}
    effects_before, effects = ({effect.compared for effect in facts.effects} for facts in (before, now))
    gone = [effect for effect in before.effects if effect.compared not in effects and effect.kind in kind]
    return tuple(
        effect_seen
        if effect_seen.compared in effects_before and effect_seen not in gone
        else evolve(effect_seen, kind=kind.get(effect_seen.kind, effect_seen.kind))
        for effect_seen in (
            *now.effects,
            *[effect_seen for effect_seen in gone if all(effect_seen.path != effect.path for effect in now.effects)],
        )
    )


def forget_stored(entry: Entry) -> Phase:
    """A recording made without a watched run did not come out as expected: begin with a watched run after all."""
    entry.plan, entry.trusts_store = None, False
    return "cold"
