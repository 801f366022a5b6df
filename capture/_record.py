"""Record: make a recording of one call, check it against the plan, and put it in the tree.

The recording run is the call. Where it cannot become a recording, its result still stands: the caller's tensors are
put where staged ones were, and what lies in the pool is moved out of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from capture import _checks, _observe, _planning, _state, _tensors, _where
from capture._call import Call
from capture._compile import compile_plan
from capture._containers import is_container
from capture._describe import Described, alias_groups
from capture._entry import RETRIES, Entry
from capture._facts import Facts, Moved
from capture._findings import Policy
from capture._outputs import OutputPlan, plan_outputs
from capture._plan import CapturePlan
from capture._repeat import any_overlap
from capture._tree import Node, Pattern, Tree
from capture.backends import Input, Pool, Recorded

if TYPE_CHECKING:
    from capture._runtime import Captured


def span_of(leaf: Any) -> int:
    """Bytes between a tensor's first element and the end of its last; 0 for what is no strided tensor."""
    strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return _tensors.span_bytes(leaf) if strided else 0


def alias_pattern(leaves: Sequence[Any], spans: Sequence[int]) -> tuple[Any, ...]:
    """Empty if no two leaves share memory; else each leaf's group, its distance from the group's first byte, and the
    first position that holds the same object."""
    begins = [leaf.data_ptr() if span else 0 for leaf, span in zip(leaves, spans, strict=True)]
    if not any_overlap(begins, spans):
        return ()
    groups = alias_groups([leaf if span else torch.empty(0) for leaf, span in zip(leaves, spans, strict=True)])
    first: dict[int, int] = {}
    for group, begin in zip(groups, begins, strict=True):
        if group is not None:
            first[group] = min(first.get(group, begin), begin)
    objects = [id(leaf) for leaf in leaves]
    return tuple(
        None if group is None else (group, begin - first[group], objects.index(objects[position]))
        for position, (group, begin) in enumerate(zip(groups, begins, strict=True))
    )


def inputs_for(call: Call, plan: CapturePlan | None, tree: Tree, pattern: Pattern) -> list[Input]:
    """How each leaf reaches the body. Without a plan every argument may turn out to be written."""
    policies = {one.path: one.policy for one in plan.placeholders} if plan is not None else {}
    tensors = [leaf if isinstance(leaf, torch.Tensor) else torch.empty(0) for leaf in call.leaves]
    groups = alias_groups(tensors)
    inputs = []
    for position, (path, leaf) in enumerate(call.paths()):
        managed = pattern[position]
        if managed is not None:
            inputs.append(Input(position=position, how="managed", managed=tree.block_of(managed)))
        elif not isinstance(leaf, torch.Tensor) or policies.get(path) is Policy.STATIC or call.is_static(path):
            inputs.append(Input(position=position, how="static"))
        else:
            back = policies.get(path, Policy.COPY_BACK) is Policy.COPY_BACK
            inputs.append(Input(position=position, how="copy-back" if back else "copy", group=groups[position]))
    return inputs


def shares_with_state(call: Call, plan: CapturePlan | None) -> bool:
    """An argument shares memory with a tensor in Python state that the body uses, and the body writes something."""
    if plan is not None and not any(one.mutated for one in plan.placeholders):
        return False
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    state = _state.snapshot(_state.roots(call.function, call.receiver, call.named_values()))
    arguments = {path for path, _ in call.paths()}
    used = None if plan is None else {one.path for one in plan.placeholders if one.kind == "implicit"}
    for leaf in tensors:
        for place, owned in state.owners(leaf.untyped_storage()):
            named = place.path not in arguments and (used is None or place.path in used)
            if named and alias_groups([leaf, owned])[0] is not None:
                return True
    return False


def record(captured: Captured, entry: Entry, call: Call, tree: Tree, pattern: Pattern, *, undo: bool = False) -> Any:
    """Record ``call`` under the current node and return its result."""
    tree.recording = True
    try:
        return _record(captured, entry, call, tree, pattern, undo=undo)
    finally:
        tree.recording = False
        if not tree.pool.is_tidy():
            captured.log.add("drop", "a tensor of a failed recording is kept: the pool is given up")
            tree.retire()


def _record(captured: Captured, entry: Entry, call: Call, tree: Tree, pattern: Pattern, *, undo: bool) -> Any:
    inputs = inputs_for(call, entry.plan, tree, pattern)
    counters = captured.log.counters
    counters.body_runs += 1
    begin = time.perf_counter()
    with _observe.capture_lock:
        tree.before_recording(captured.log)
        recorded = tree.backend.record(tree.pool, call, inputs, undo=undo, warm=entry.facts is not None)
    if recorded.described is None:
        return _without_facts(captured, entry, call, tree, recorded, undo=undo)
    facts, plan = _facts_and_plan(captured, entry, recorded)
    written = _written(call, inputs, facts)
    if recorded.executed:
        count_writes(written, call.leaves)
    if not _expel_state(tree, recorded.described):
        facts = evolve(facts, refused="a tensor of Python state lies in the pool and cannot be moved out of it")
        plan = compile_plan(captured.annotation, facts)
    if recorded.recording is None or plan.outcome != "record" or not _as_planned(entry.plan, plan):
        return _refused(captured, entry, call, tree, recorded, facts, plan, undo=undo)
    entry.facts, entry.plan, entry.differing_runs = facts, plan, 0
    captured.note_findings(plan)
    if entry.plan_is_new:
        _planning.save(captured, entry)
    outputs = _plan_outputs(captured, recorded, tree.pool)
    node = _node(captured, entry, call, recorded, outputs, inputs, pattern)
    node.written = written
    result = _result(captured, call, tree, node, recorded, undo=undo)
    tree.attach(node)
    entry.nodes.append(node)
    counters.recordings += 1
    ms = (time.perf_counter() - begin) * 1e3
    captured.log.add(
        "record", f"{plan.num_ops} operators, depth {len(tree.path)}", ms=ms, nbytes=tree.pool.reserved_bytes()
    )
    if undo:
        _undo(recorded)
    return result


def _named(captured: Captured, call: Call) -> Callable[[], dict[str, Any]]:
    return lambda: {**call.named_values(), "self": captured.receiver}


def _expel_state(tree: Tree, described: Described) -> bool:
    return all(tree.expel(one.owners[0][1]) for one in described.implicit if one.owners)


def _result(captured: Captured, call: Call, tree: Tree, node: Node, recorded: Recorded, *, undo: bool) -> Any:
    """The call's result: the recording run's own values, or what the first replay gives."""
    outputs, described = node.outputs, recorded.described
    assert outputs is not None
    assert described is not None
    if not recorded.executed:
        return None if undo else captured.run_recording(node, tree, call)
    return outputs.finish(outputs.adopt(_own_values(outputs, call, described)), _named(captured, call))


def _own_values(outputs: OutputPlan, call: Call, described: Described) -> list[Any]:
    owners = {one.path: one.owners[0][1] for one in described.implicit if one.owners}
    return outputs.own_values(_kept_values(described), call.leaves, owners.__getitem__)


def _undo(recorded: Recorded) -> None:
    watched = recorded.watched
    if watched is not None and recorded.executed:
        _observe.undo(watched)
    elif watched is not None:
        _state.restore(watched.before, watched.changed)


def _refused(
    captured: Captured, entry: Entry, call: Call, tree: Tree, recorded: Recorded, facts: Facts, plan: CapturePlan, *,
    undo: bool,
) -> Any:  # fmt: skip
    """The run is no recording, or not the one that was planned."""
    reason = facts.refused or recorded.failure or "the recording run differs from the plan"
    if not recorded.executed:
        return _run_instead(captured, entry, call, tree, recorded, facts, plan, reason, undo=undo)
    assert recorded.described is not None
    outputs = _plan_outputs(captured, recorded, tree.pool)
    values = _own_values(outputs, call, recorded.described)
    _leave_pool(tree, recorded)
    result = outputs.finish(values, _named(captured, call))
    if undo:
        _undo(recorded)
    _planning.replace(captured, entry, facts, plan, reason)
    return result


def _without_facts(captured: Captured, entry: Entry, call: Call, tree: Tree, recorded: Recorded, *, undo: bool) -> Any:
    """The body raised, or was stopped."""
    watched = recorded.watched
    error = watched.error if watched is not None else None
    if recorded.executed or (error is not None and not isinstance(error, Exception) and not recorded.stopped):
        assert watched is not None
        assert error is not None
        if recorded.executed:
            _leave_pool(tree, recorded)
            _settle_effects(call, recorded)
        if undo or not recorded.executed:
            _undo(recorded)
        raise error
    facts = entry.facts or captured.bare_facts()
    if watched is not None and watched.watch.notes.syncs:
        facts = evolve(facts, host_syncs=tuple(watched.watch.notes.syncs.values()))
    else:
        facts = evolve(facts, refused=recorded.failure)
    plan = compile_plan(captured.annotation, facts)
    reason = recorded.failure or "the capture failed"
    return _run_instead(captured, entry, call, tree, recorded, facts, plan, reason, undo=undo)


def _run_instead(
    captured: Captured, entry: Entry, call: Call, tree: Tree, recorded: Recorded, facts: Facts, plan: CapturePlan,
    reason: str, *, undo: bool,
) -> Any:  # fmt: skip
    """Only the body's Python has run: undo that, and run the body as a plain call."""
    if recorded.recording is not None:
        recorded.recording.release()
    raised = recorded.watched is not None and recorded.watched.error is not None and not recorded.stopped
    _undo(recorded)
    if recorded.watched is not None:
        recorded.watched.forget()
    if recorded.transient:
        captured.log.add("drop", reason)
        entry.differing_runs += 1
        entry.phase = "eager" if entry.differing_runs > RETRIES else entry.phase
        return None if undo else captured.run_eagerly(call, reason)
    if entry.facts is None:  # recorded straight away, without a watched run
        captured.log.add("drop", reason)
        _planning.forget_stored(entry)
        return None if undo else _planning.observe(captured, entry, call, tree)
    if raised and not undo:  # eager's own error, if it raises one, comes first
        result = captured.run_eagerly(call, reason)
        _planning.replace(captured, entry, facts, plan, reason)
        return result
    _planning.replace(captured, entry, facts, plan, reason)
    return None if undo else captured.run_eagerly(call, reason)


def _facts_and_plan(captured: Captured, entry: Entry, recorded: Recorded) -> tuple[Facts, CapturePlan]:
    assert recorded.described is not None
    assert recorded.watched is not None
    facts = _planning.compared(entry, recorded.described.facts, recorded.watched.watch.notes.lines)
    if not recorded.executed and entry.facts is not None:
        facts = evolve(facts, draws=entry.facts.draws)  # generators do not move while capturing
    known = facts.host_syncs or facts.host_work or facts.subclasses or any(o.kind == "foreign" for o in facts.outputs)
    if recorded.failure is not None and not known:
        facts = evolve(facts, refused=recorded.failure)
    plan = compile_plan(captured.annotation, facts, fingerprint=entry.plan.fingerprint if entry.plan else {})
    return facts, plan


def _as_planned(expected: CapturePlan | None, found: CapturePlan) -> bool:
    """The recording run did what the plan says: the same inputs, writes, outputs, effects and operators."""
    if expected is None:
        return True

    def decisions(plan: CapturePlan) -> tuple[Any, ...]:
        return (
            [(one.path, one.kind, one.mutated, one.policy) for one in plan.placeholders],
            [(one.path, one.kind, one.source, one.value) for one in plan.outputs],
            [(one.path, one.kind) for one in plan.effects],
            plan.sequence_digest,
        )

    return decisions(expected) == decisions(found)


def _kept_values(described: Described) -> list[Any]:
    return [
        leaf.value for leaf in (*described.outputs, *(one for effect in described.effects for one in effect.leaves))
    ]


def _plan_outputs(captured: Captured, recorded: Recorded, pool: Pool) -> OutputPlan:
    described, watched = recorded.described, recorded.watched
    assert described is not None
    assert watched is not None
    owners = {place.path: tensor for owned in watched.before.tensors.values() for place, tensor in owned}
    own = {id(value): place for place, value in watched.before.places.values() if is_container(value)}
    return plan_outputs(
        captured.annotation.outputs, watched.result, described.outputs, described.effects, recorded.blocks,
        watched.arguments, owners.__getitem__, pool, own,
    )  # fmt: skip


def _node(
    captured: Captured, entry: Entry, call: Call, recorded: Recorded, outputs: OutputPlan, inputs: Sequence[Input],
    pattern: Pattern,
) -> Node:  # fmt: skip
    described, watched = recorded.described, recorded.watched
    assert described is not None
    assert watched is not None
    paths = [path for path, _ in call.paths()]
    static = [
        (one.position, paths[one.position], call.leaves[one.position])
        for one in inputs
        if one.how == "static" and isinstance(call.leaves[one.position], torch.Tensor)
    ]
    replaced = {effect.change.place.path for effect in described.effects}
    mutated = _mutated(described.facts)
    copied = [one.position for one in inputs if one.how in ("copy", "copy-back")]
    checker = _checks.make_checker(watched.before, described.implicit, static, replaced, call.leaves, copied, mutated)
    statics = {one.path: one.owners[0][1] for one in described.implicit}
    return Node(
        function=captured, log=captured.log, key=(entry.number, pattern), recording=recorded.recording,
        outputs=outputs, check=checker.function, checker=checker, statics=statics,
        generators=tuple(place.get() for place in watched.before.generators.values()),
        layout=recorded.layout,
    )  # fmt: skip


def _mutated(facts: Facts) -> set[str]:
    return {one.path for one in facts.placeholders if one.mutation is not None}


def _written(call: Call, inputs: Sequence[Input], facts: Facts) -> tuple[int, ...]:
    paths = [path for path, _ in call.paths()]
    mutated = _mutated(facts)
    return tuple(one.position for one in inputs if one.how == "managed" and paths[one.position] in mutated)


def count_writes(positions: Sequence[int], leaves: Sequence[Any]) -> None:
    """Managed inputs are written through tensors of the recording's own; autograd must see it on the caller's."""
    for position in positions:
        if not leaves[position].is_inference():
            torch.autograd.graph.increment_version(leaves[position])


def _leave_pool(tree: Tree, recorded: Recorded) -> None:
    """Move everything that a refused run made, and that is still used, out of the pool."""
    assert recorded.watched is not None
    for produced in recorded.watched.watch.alive().values():
        storage = produced.storage()
        if storage is not None and tree.pool.find(storage.data_ptr()) and not tree.pool.evacuate(storage):
            tree.retire()
            return
    tree.pool_is_at = None


def _settle_effects(call: Call, recorded: Recorded) -> None:
    """A body that raised may have kept staged inputs on attributes: put the caller's tensors there."""
    assert recorded.watched is not None
    staged = {id(leaf): position for position, (_, leaf) in enumerate(recorded.watched.arguments)}
    for change in recorded.watched.changed:
        if not change.container and id(change.after) in staged:
            change.place.set(call.leaves[staged[id(change.after)]])


def rebind(node: Node, leaves: Sequence[Any]) -> tuple[Moved, ...] | None:
    """Point a recording at static tensors that moved. None if they are not of the same kind any more."""
    checker = node.checker
    current = checker.current()
    if current is None or node.recording is None:
        return None
    moved = []
    tensors: dict[str, torch.Tensor] = {}
    for path, tensor in current.items():
        old = node.statics[path]
        at = checker.address_of(path)
        if tensor is old and tensor.data_ptr() == at:
            continue
        if not checker.same_kind(path, tensor) or node.tree is None or not node.tree.expel(tensor):
            return None
        moved.append(Moved(path=path, before_addr=at, after_addr=tensor.data_ptr(), where=_where.here()))
        tensors[path] = tensor
    for position, path, name in checker.arguments:
        tensor = leaves[position]
        if tensor.data_ptr() != checker.scope[name]:
            moved.append(
                Moved(path=path, before_addr=checker.scope[name], after_addr=tensor.data_ptr(), where=_where.here())
            )
            tensors[path] = tensor
    if not moved or not node.recording.rebind(tensors):
        return None
    node.statics.update({path: tensor for path, tensor in tensors.items() if path in current})
    checker.settle_now(node.statics, leaves)
    if checker.function(leaves) not in (_checks.OK, _checks.OVERLAPS):
        return None
    return tuple(moved)
