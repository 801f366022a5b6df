"""Record: make a recording of one call, check it against the plan, and put it in the tree.

The recording run is the call. Where it cannot become a recording, its result still stands: the caller's tensors are
put where staged ones were, and what lies in the pool is moved out of it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from capture.core.facts import Drift, Facts, SequenceChange
from capture.core.interrupts import guarded, is_interrupt
from capture.core.plan import CapturePlan, sequence_digest
from capture.distributed import process_groups, rank_agreement
from capture.engines.base import BoundInput, Input, Recorded, StateTensors
from capture.guards.recording_guard import RecordingGuard, asking_who, make_recording_guard
from capture.native import native
from capture.observe.capture_lock import locked
from capture.observe.described import DescribedRun
from capture.observe.expectation import Expectation, other_result
from capture.rules.compile_plan import compile_plan
from capture.runtime import arrays, branches, formulas, gradient_offload, record_failure
from capture.runtime.captured import Captured
from capture.runtime.entry import RETRIES, Entry
from capture.runtime.in_line import read_in_line
from capture.runtime.inputs import generators_of, inputs_for, known_to_move, moving_paths, written_paths
from capture.runtime.record_outputs import kept_values, own_values, plan_recorded, with_gradients_read
from capture.runtime.replay import count_writes, tell
from capture.runtime.verdict import Reply, Verdict, done
from capture.state import body_run
from capture.state.call import Call
from capture.tree.node import Node, Pattern, node_parts
from capture.tree.output_structure import Begun
from capture.tree.outputs import OutputPlan
from capture.tree.tree import Tree

MOST_OWNED = 64 << 10
"""Bytes of an output that has memory of its own from its first call on. More of it comes anew from the system in each
call, page by page: 1.5 times as slow for 32 MiB."""
latest_guards: weakref.WeakKeyDictionary[Captured, weakref.ref[RecordingGuard]] = weakref.WeakKeyDictionary()
"""The guards of each function's latest recording; the next one's are the same in most cases."""


def record(captured: Captured, entry: Entry, call: Call, tree: Tree, pattern: Pattern, *, undo: bool = False) -> Reply:
    """Record ``call`` under the current node. Its result, or what is to give it where nothing of the run stands."""
    communicates = entry.plan is not None and bool(entry.plan.collectives)
    attempt = record_failure.Attempt(captured, call, tree, undo, communicates)
    try:
        reply = guarded(_attempted, (attempt, entry, pattern), attempt.mend)
    except BaseException as error:
        if (isinstance(error, Exception) and not is_interrupt(error)) or not attempt.is_to_be_completed:
            raise
        return Reply(Verdict.EAGER, reason="it was stopped where there was no way back", interrupt=error)
    finally:
        call.forget_run()
    return reply


def _attempted(attempt: record_failure.Attempt, entry: Entry, pattern: Pattern) -> Reply:
    captured, call, tree = attempt.captured, attempt.call, attempt.tree
    tree.recording = True
    gradient_offload.park(attempt.parked, entry, call)
    if attempt.parked.nbytes or (entry.facts is not None and not entry.nodes):  # after a watched run
        locked(tree.make_room, captured.log)
    with rank_agreement.exchange(captured, entry) as exchange:
        reply = _record(captured, entry, call, tree, pattern, exchange, undo=attempt.undo)
    attempt.end(reply)
    return reply


def _record(
    captured: Captured, entry: Entry, call: Call, tree: Tree, pattern: Pattern, exchange: rank_agreement.Exchange, *,
    undo: bool,
) -> Reply:  # fmt: skip
    if not tree.may_record(captured.log):
        return Reply(Verdict.EAGER, reason="its pool was given up")
    inputs = inputs_for(call, entry, tree, pattern)
    counters = captured.log.counters
    counters.body_runs += 1
    begin = time.perf_counter()
    apart = [input_.position for input_ in inputs if input_.is_apart]
    expected = None if apart or call.formulas is not None else entry.expected  # runs before told of neither
    recorded, followed, parted = _run(captured, entry, call, tree, inputs, expected, undo=undo), True, None
    if recorded.followed in ("unsuited", "differs"):
        followed, parted = recorded.followed == "unsuited", recorded.parted
        _forget_run(captured, entry, recorded)
        del recorded  # and what it holds of the pool
        if not tree.put_away(captured.log, "a recording that was not as watched"):
            return Reply(Verdict.EAGER, reason="its pool was given up")
        recorded = _run(captured, entry, call, tree, inputs, None, undo=undo)
    for kind, milliseconds, nbytes in recorded.parts:
        captured.log.add(kind, ms=milliseconds, nbytes=nbytes)
    if recorded.described is None:
        exchange.fall_out(recorded)
        return record_failure.without_facts(captured, entry, call, tree, recorded, undo=undo)
    branch = branches.followed(captured, entry, recorded.described.facts)
    recorded.described.facts, is_known = branch, entry.turn_to(branch.reads)
    if recorded.recording is not None and branch.reads:
        recorded.recording.reads = branch.reads  # only the end of the run told which numbers are kept and nothing else
    if recorded.followed == "yes" and entry.facts is not None and entry.plan is not None:
        facts, plan = entry.facts, entry.plan
    else:
        facts, plan = _facts_and_plan(captured, entry, recorded, parted)
    written = _written(call, [input_.position for input_ in inputs if input_.how == "managed"], recorded, facts)
    uncounted = (*written, *_written(call, apart, recorded, facts))
    if recorded.executed:
        count_writes(uncounted, call.leaves)
    holds = is_known and followed and (plan is entry.plan or _as_planned(entry.plan, plan)) and not facts.gradients
    holds = holds and recorded.recording is not None and _covered(captured, entry, call, recorded.described)
    facts, plan = _heard(exchange, captured, entry, recorded, facts, plan, holds=holds)
    if not holds or plan.outcome != "record":
        new = not is_known and recorded.failure is None
        return record_failure.refused(captured, entry, call, tree, recorded, facts, plan, undo=undo, is_branch=new)
    entry.facts, entry.plan, entry.differing_runs = facts, plan, 0
    captured.note_findings(plan)
    outputs = plan_recorded(captured, entry, recorded, tree.pool)
    node = _node(captured, entry, call, recorded, outputs, inputs, pattern)
    _note_computed(node, call, recorded, outputs, written)
    read_in_line(captured, entry, node)
    node.make_owned(_owned(captured, entry, tree, outputs))
    process_groups.note_user(node, facts)
    call.settle(node)
    result = _result(captured, entry, call, tree, node, recorded, uncounted, undo=undo)
    captured.note_form(entry, facts)
    counters.recordings += 1
    ms = (time.perf_counter() - begin) * 1e3
    captured.log.add("record", _detail(plan, tree, recorded), ms=ms, nbytes=tree.pool.reserved_bytes())
    if undo:
        record_failure.undo_run(recorded)
    return done(result)


def _note_computed(
    node: Node, call: Call, recorded: Recorded, outputs: OutputPlan, written: tuple[int, ...]
) -> None:  # fmt: skip
    assert recorded.described is not None
    node.written = written
    node.computed = recorded.described.computed
    node.placed = formulas.placed(call, recorded.described, outputs)
    if node.computed is not None and node.computed.given and recorded.watched is not None:
        read = {at: recorded.watched.watch.trace.kept[at][0] for at in node.computed.taken}
        node.first_numbers = node.computed.numbers(call.values, read)


def _covered(captured: Captured, entry: Entry, call: Call, described: DescribedRun) -> bool:
    """Whether it is known what this run does with numbers, and with arrays, that its key leaves out; and that the
    questions which its formulas ask are those of its own key."""
    branch, computed = described.facts, described.computed
    is_covered = captured.decisions is None or captured.decisions.covers(call.values, branch)
    shown = [] if captured.decisions is None else captured.decisions.shown_for(entry.constants)
    if computed is not None and computed.asked and shown:
        entry.shares_no_proof |= (asks_more := computed.questions() not in [one.questions() for one in shown])
        is_covered = is_covered and not asks_more
    return bool(is_covered) and arrays.covers(captured, entry, call, branch)


def _owned(captured: Captured, entry: Entry, tree: Tree, outputs: OutputPlan) -> list[int]:
    """Groups of outputs that have fresh memory in every call: those that were kept before, and small ones where that
    costs nothing, so that they may be resized as eager's."""
    costs_nothing = tree.backend.owns_in_place and entry.region is None and captured.deposits is None
    costs_nothing = costs_nothing and not captured.is_chained and outputs.preserving and not outputs.inference
    small = MOST_OWNED if costs_nothing else 0
    left = {*outputs.gradients, *outputs.shared}
    return [
        number
        for number, group in enumerate(outputs.groups)
        if captured.is_owned(entry.number, group.paths) or (group.block.nbytes <= small and number not in left)
    ]


def _detail(plan: CapturePlan, tree: Tree, recorded: Recorded) -> str:
    inside = recorded.recording.copied_inside if recorded.recording is not None else 0
    return f"{plan.num_ops} operators, depth {len(tree.path)}" + (f", {inside} inputs copied by it" if inside else "")


def _heard(
    exchange: rank_agreement.Exchange, captured: Captured, entry: Entry, recorded: Recorded, facts: Facts,
    plan: CapturePlan, *, holds: bool,
) -> tuple[Facts, CapturePlan]:  # fmt: skip
    """Facts and plan after the other ranks were heard. ``holds``: it is a recording, as far as this rank knows."""
    again = recorded.transient and entry.differing_runs < RETRIES
    failure = None if holds or again else recorded.failure or "its recording run differs from its plan"
    heard = rank_agreement.agreed(exchange, captured, entry, facts, executed=recorded.executed, failure=failure)
    return (facts, plan) if heard is facts else (heard, compile_plan(captured.annotation, heard))


def _forget_run(captured: Captured, entry: Entry, recorded: Recorded) -> None:
    """A run that was not what was expected has not happened; the body runs once more."""
    captured.log.add("miss", f"not as in the watched run: {recorded.failure}")
    captured.log.counters.body_runs += 1
    record_failure.undo_run(recorded)
    if recorded.watched is not None:
        recorded.watched.forget()
    entry.expected = None


def _run(
    captured: Captured, entry: Entry, call: Call, tree: Tree, inputs: Sequence[Input], expected: Expectation | None, *,
    undo: bool,
) -> Recorded:  # fmt: skip
    """Let the engine record the body."""

    def run() -> Recorded:
        tree.before_recording(captured.log)
        with captured.log.range("record"), captured.log.progress_line("record"), captured.optimizers.watching():
            recorded = tree.backend.record(
                tree.pool,
                call,
                inputs,
                undo=undo,
                state=StateTensors(moving_paths(entry), written_paths(entry)),
                generators=generators_of(call, entry),
                expected=expected if entry.facts is not None else None,
                may_break=branches.may_follow(entry) and (entry.has_reads or entry.facts is None),
                schedule=captured.annotation.schedule == "auto",
            )
        if recorded.watched is not None:
            captured.optimizers.note_gradients(*recorded.watched.gradient_uses())
        return recorded

    return locked(run)


def _result(
    captured: Captured, entry: Entry, call: Call, tree: Tree, node: Node, recorded: Recorded, uncounted: Sequence[int],
    *, undo: bool,
) -> Any:  # fmt: skip
    """The call's result, and the node in the tree: the recording run's own values, or what the first replay gives."""
    outputs, described = node.outputs, recorded.described
    assert outputs is not None
    assert described is not None
    if not recorded.executed and not undo:
        begun = outputs.done_by([effect.change for effect in described.effects], call.named_roots)
        own = outputs.own_reads(kept_values(described))
        return _first_replay(captured, entry, node, tree, call, uncounted, begun, own)
    result = None
    if recorded.executed:
        values = outputs.adopt(own_values(outputs, call, described))
        done = outputs.done_by([effect.change for effect in described.effects], call.named_roots)
        result = call.whole(outputs.finish(values, call.named_roots, begun=done))
    _put_in(entry, tree, node)
    return result


def _put_in(entry: Entry, tree: Tree, node: Node) -> None:
    """The node is in the tree, and the call that records is over: what comes from here on are replays."""
    assert node.outputs is not None
    node.outputs.own = {}
    if tree.current is not node:
        tree.attach(node)
    if not branches.lacks_numbers(node):  # else once it is known where it has them (``given_numbers``)
        branches.begin_alike(entry, node, tree)
    if node not in entry.nodes:
        node.listed_in(entry.nodes, entry.parts)
        entry.made += 1


def _facts_and_plan(
    captured: Captured, entry: Entry, recorded: Recorded, parted: SequenceChange | Drift | None
) -> tuple[Facts, CapturePlan]:
    assert recorded.described is not None
    assert recorded.watched is not None
    facts = entry.compared(recorded.described.facts, recorded.watched.watch.trace.lines)
    if facts.sequence_change is None and not facts.drifts:  # the run that was followed first may tell more
        facts = evolve(facts, drifts=(parted,)) if isinstance(parted, Drift) else evolve(facts, sequence_change=parted)
    if not recorded.executed and entry.facts is not None:
        facts = evolve(facts, draws=entry.facts.draws)  # generators do not move while capturing
    unfollowed = any(not host_sync.is_compared for host_sync in facts.host_syncs)
    unfollowed = unfollowed or any(island.obstacle for island in facts.islands)
    is_explained = unfollowed or facts.host_work or facts.subclasses or any(o.kind == "foreign" for o in facts.outputs)
    obstacle = _only_captured(entry.plan, facts, recorded) if entry.plan is not None else None
    if (recorded.failure is not None and not is_explained) or obstacle is not None:
        facts = evolve(facts, refused=recorded.failure or obstacle)
    plan = compile_plan(captured.annotation, facts, fingerprint=entry.plan.fingerprint if entry.plan else {})
    if not recorded.executed and entry.plan is not None:
        plan = evolve(plan, generators=entry.plan.generators)
    return facts, plan


def _only_captured(expected: CapturePlan, facts: Facts, recorded: Recorded) -> str | None:
    """What the same operators gave otherwise than in the watched run, where nothing but the capture gave it."""
    watched = recorded.watched
    if recorded.executed or watched is None or sequence_digest(facts.sequence) != expected.sequence_digest:
        return None
    return other_result(expected.outputs, facts.outputs, watched.call)


def _as_planned(expected: CapturePlan | None, recorded: CapturePlan) -> bool:
    """Whether the recording run did what the plan says: the same inputs, writes, outputs, effects and operators."""
    if expected is None:
        return True

    def decisions(plan: CapturePlan) -> tuple[Any, ...]:
        return (
            [
                (placeholder.path, placeholder.kind, placeholder.mutated, placeholder.policy)
                for placeholder in plan.placeholders
            ],
            [output.compared for output in plan.outputs],
            [effect.compared for effect in plan.effects],
            plan.sequence_digest,
        )

    return decisions(expected) == decisions(recorded)


def _first_replay(
    captured: Captured, entry: Entry, node: Node, tree: Tree, call: Call, uncounted: Sequence[int], begun: Begun,
    values: list[Any],
) -> Any:  # fmt: skip
    """What makes a call happen that was only captured so far, and all that has to follow then. ``uncounted``: see
    `count_writes`; ``begun``: see `EffectSlot.apply`; ``values``: the leaves, with those that the run itself read."""
    recording, outputs = node.recording, node.outputs
    assert recording is not None
    assert outputs is not None
    tries: list[bool] = []

    def finish(ended: bool) -> Any:
        if not ended:
            return None
        again = bool(tries)
        tries.append(True)
        call.watched.is_settled, call.undo = True, None  # from here on it is the call
        call.watched.watch.islands_ran.clear()
        if not again:
            count_writes(uncounted, call.leaves)
        built = outputs.build(
            tree.pool, call.leaves, node.statics.__getitem__, call.named_roots, values=values, again=again, begun=begun
        )
        _put_in(entry, tree, node)
        return call.whole(built)

    result = native.committed(recording.replay, (call.leaves,), finish, lambda errors: tell(captured, errors))
    if (run := body_run.current()) is not None:
        run.replay(result)
    return result


def _node(
    captured: Captured, entry: Entry, call: Call, recorded: Recorded, outputs: OutputPlan, inputs: Sequence[Input],
    pattern: Pattern,
) -> Node:  # fmt: skip
    described, watched = recorded.described, recorded.watched
    assert described is not None
    assert watched is not None
    if watched.watch.notes_code:
        entry.ran.update(watched.ran)
    paths = [path for path, _ in call.paths()]
    static = [input_.position for input_ in inputs if input_.how == "static"]
    mutated = _mutated(described.facts)
    bound = [input_.position for input_ in inputs if input_.is_bound]
    copied = [input_.position for input_ in inputs if input_.how in ("copy", "copy-back")]
    latest = latest_guards.get(captured)
    like = latest() if latest is not None else None
    asks = entry.asks_who | asking_who(watched.ran)
    guard = locked(  # else some of what it reads may be another thread's stand-ins
        make_recording_guard, described, watched, call, static, copied, entry.ran, like, entry.read, asks
    )
    latest_guards[captured], entry.places, entry.read = weakref.ref(guard), guard.places, None
    statics = {input_.path: input_.owners[0][1] for input_ in (*described.implicit, *described.guarded)}
    outputs.leave_out_gradients(with_gradients_read(described, statics))
    outputs.deposits = captured.deposits
    parts = node_parts(
        function=captured, recording=recorded.recording, outputs=outputs, check=guard.check, guard=guard,
        statics=statics, generators=tuple(source.get() for source in watched.before.generators.values()),
        bound=tuple(BoundInput(position=at, path=paths[at], is_written=paths[at] in mutated) for at in bound),
    )  # fmt: skip
    reads = () if recorded.recording is None else recorded.recording.reads
    return Node(
        parts=parts, log=captured.log, key=(entry.number, pattern), layout=recorded.layout, reads=reads,
        moving=known_to_move(entry),
    )  # fmt: skip


def _mutated(facts: Facts) -> set[str]:
    return {placeholder.path for placeholder in facts.placeholders if placeholder.mutation is not None}


def _written(call: Call, positions: Sequence[int], recorded: Recorded, facts: Facts) -> tuple[int, ...]:
    """Those of the inputs whose version counters show that the body wrote them."""
    mutated, paths = _mutated(facts), [path for path, _ in call.paths()]
    unseen = recorded.watched.uncounted_arguments() if recorded.watched is not None else set[int]()
    return tuple(at for at in positions if paths[at] in mutated and at not in unseen)
