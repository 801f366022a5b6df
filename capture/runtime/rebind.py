"""Rebind: a static tensor of a recording moved.

A recording is pointed at the new address. Where its engine has to learn first which of its parameters follow the
tensor, it does so at the first move, and that call is compared with eager. Where that is impossible, the recording is
dropped and made again, and a tensor that moves often is copied in every call.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from capture.autograd.saved_graph import reshaped
from capture.core.facts import LimitReached, Moved, Unbound
from capture.core.interrupts import let_through
from capture.core.plan import CapturePlan
from capture.engines.base import Move, Recording, Refusal
from capture.guards.guard import MOVED
from capture.guards.recording_guard import ALIGNMENT, RecordingGuard
from capture.guards.same_state import in_place_of
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Leaf
from capture.key.tensor_meta import merged, range_of
from capture.observe import source_location
from capture.observe.capture_lock import locked
from capture.rules.compile_plan import compile_plan
from capture.runtime import record
from capture.runtime.captured import Captured
from capture.runtime.entry import MOVES, Entry
from capture.runtime.inputs import generators_of
from capture.runtime.verdict import GO_ON, START_OVER, Reply, Verdict
from capture.state.call import Call
from capture.tree.node import Node
from capture.tree.tree import Tree

_NAMED = 4  # moves that are named in an event


def state_moved(
    captured: Captured, entry: Entry, node: Node, values: tuple[Any, ...], leaves: list[Leaf], tree: Tree
) -> Reply:
    """How a call goes on whose recording found its state elsewhere. ``OBSERVE``: more than an address is another."""
    begin = time.perf_counter()
    if node.check is _is_being_bound:  # a rebind was interrupted: the recording may read either address
        return Reply(Verdict.OBSERVE)
    moves_and_others = _moves(node, leaves, node.guard.current())
    guard = None
    if moves_and_others is None or not moves_and_others[0]:
        guard = _in_place(captured, entry, node, values, leaves)
        moves_and_others = _moves(node, leaves, [owner.tensor for owner in guard.owners]) if guard is not None else None
    if moves_and_others is None or not (moves_and_others[0] or guard is not None):
        return START_OVER if node.program is not None and _forgets_reshaped() else Reply(Verdict.OBSERVE)
    moves, others = moves_and_others
    outside = _outside(node, tree, _read_where_they_are(node, moves))
    node.check = _is_being_bound
    refusal, learned = _bind(captured, entry, node, values, leaves, tree, moves, others, outside=outside)
    if node.tree is None:  # the pool was given up meanwhile
        return START_OVER
    if refusal is not None:
        _drop(captured, entry, node, moves, refusal)
        given_up = _given_up(captured, entry, moves)
        return GO_ON if given_up is None else Reply(Verdict.EAGER, plan=given_up)
    if guard is not None:
        node.guard, entry.places = guard, guard.places
        record.latest_guards[captured] = weakref.ref(guard)
    _settle(node, moves, leaves)
    bound = _follow(node, leaves)
    node.check = node.guard.check
    captured.log.counters.rebinds += 1
    captured.log.add("rebind", _text(moves), ms=(time.perf_counter() - begin) * 1e3)
    promised = [move for move in moves if move.path not in bound]
    if any(("CG101", move.path) not in captured.findings for move in promised):
        _note_moved(captured, promised)
    learned_now = moves if learned else []
    if not node.check(leaves):
        return Reply(Verdict.REPLAY, learned=learned_now)
    if learned_now:
        _drop(captured, entry, node, learned_now, Refusal("it could not be compared with eager", lasting=False))
        return GO_ON
    return GO_ON if guard is None else Reply(Verdict.OBSERVE)  # made of what is there now: it would fail for ever


def _forgets_reshaped() -> bool:
    """Let go of the autograd graphs that end at leaves of another shape than they have now, and of all that was
    recorded of those functions. False if there is none."""
    found = reshaped()
    for program in found:
        program.owner.forget_all()
        program.give_up_graph()
    return bool(found)


def _is_being_bound(_: Sequence[Any]) -> int:
    """The check of a recording from the first change of where it reads to the last one."""
    return MOVED


def _follow(node: Node, leaves: Sequence[Any]) -> frozenset[str]:
    """Bound arguments that the engine has come to know are its business from now on. Gives the paths of all."""
    paths = frozenset(input_.path for input_ in node.bound)
    if paths:
        assert node.recording is not None
        taken = node.recording.bind_inputs(node.bound)
        node.bound = tuple(input_ for input_ in node.bound if input_.path not in taken)
        if taken:
            node.guard.leave_out(taken, leaves)
    return paths


def _in_place(
    captured: Captured, entry: Entry, node: Node, values: tuple[Any, ...], leaves: list[Leaf]
) -> RecordingGuard | None:
    """Guards for objects that took the places of others and are as those were. None where more is another, or where the
    recording hands out objects: it would hand out those before."""
    assert node.outputs is not None
    constants = [value for _, value in node.outputs.constants]
    if node.groups or not all(value is None or type(value) in PLAIN_TYPES for value in constants):
        return None
    latest = record.latest_guards.get(captured)
    call = captured.call(values, leaves, entry)
    newest = latest() if latest is not None else None
    # under the lock: else some of what it reads may be another thread's stand-ins
    return locked(in_place_of, node.guard, call, entry.ran, leaves, newest)


def _moves(
    node: Node, leaves: Sequence[Any], current: Sequence[torch.Tensor] | None
) -> tuple[list[Move], list[Move]] | None:
    """Static tensors that moved to the ``current`` ones, and those that did not; None if they are not of the same kind
    any more."""
    guard: RecordingGuard = node.guard
    if current is None or node.recording is None or node.tree is None or not guard.same_kinds(current):
        return None
    if not guard.stays_beside():
        return None
    moves, others = [], []
    for owner, tensor in zip(guard.owners, current, strict=True):
        path, before, tensor_before = owner.path, owner.address, owner.tensor
        now = tensor.data_ptr()
        if tensor is tensor_before and now == before:
            others.append(Move(path, before, tensor, tensor_before))
        elif (now ^ before) & (ALIGNMENT - 1) or (now != before and path in guard.shared):
            return None
        else:
            moves.append(Move(path, before, tensor, tensor_before))
    replaced = [tensor for move in moves if move.tensor is not move.was for tensor in (move.tensor, move.was)]
    if replaced and guard.looks_up([tensor for tensor in replaced if tensor is not None]):
        return None
    for argument in guard.arguments:
        leaf = leaves[argument.position]
        move = Move(argument.path, argument.address, leaf)
        (others if leaf.data_ptr() == argument.address else moves).append(move)
    return None if _joins_others(guard, moves, others) or _writes_copied(node, [*moves, *others]) else (moves, others)


def _joins_others(guard: RecordingGuard, moves: Sequence[Move], others: Sequence[Move]) -> bool:
    """Whether a tensor that moved is now one with a tensor in another place, as where weights are tied, or lies on the
    memory of one and either is written. They were apart when the recording was made: a comparison by ``is`` said so,
    each had a gradient of its own, and operators on the one could come before or after those on the other. What
    arguments share with each other is part of the key."""
    static = [*moves, *others]
    owners = [move for move in static if move.was is not None]
    if len({id(move.tensor) for move in owners}) < len({id(move.was) for move in owners}):
        return True
    if guard.expects([move.tensor for move in moves if move.was is not None and move.tensor is not move.was]):
        return True
    if not guard.written:
        return False
    moved, of_state = {move.path for move in moves}, {move.path for move in owners}
    paths, end = set[str](), 0
    for (begin, after), path in sorted([(range_of(move.tensor), move.path) for move in static]):
        if begin == after:
            continue
        paths = {path} if begin >= end else paths | {path}
        end = max(end, after)
        if len(paths) > 1 and paths & moved and paths & of_state and paths & guard.written:
            return True
    return False


def _writes_copied(node: Node, static: Sequence[Move]) -> bool:
    """Whether the recording now writes memory that it also reads through an earlier copy, which would miss the write.

    When it was made, no tensor that it copies lay on memory that it writes. A place that the body gives another tensor
    in every call may later hold one that the body writes.
    """
    assert node.recording is not None
    copied = node.recording.copied_paths
    if not copied or not node.guard.written:
        return False
    written = merged(sorted(range_of(owner.tensor) for owner in static if owner.path in node.guard.written))
    return any(_meets(range_of(owner.tensor), written) for owner in static if owner.path in copied)


def _meets(memory: tuple[int, int], ranges: tuple[list[int], list[int]]) -> bool:
    return any(memory[0] < end and begin < memory[1] for begin, end in zip(*ranges, strict=True))


def _read_where_they_are(node: Node, moves: Sequence[Move]) -> Sequence[Move]:
    """Those whose addresses the recording has. It copies what was known to move and operators read; of the rest a
    kernel may read some that no operator tells of."""
    assert node.recording is not None
    rest = [move for move in moves if move.path not in node.recording.copied_paths]
    unread = [move for move in rest if move.path in node.moving and move.path not in node.guard.written]
    alone = node.recording.leaves_alone(unread) if unread else frozenset()
    return [move for move in rest if move.path not in alone]


def _outside(node: Node, tree: Tree, moves: Sequence[Move]) -> bool:
    """Whether no moved tensor lies in the pool, or the engine tells it there from what recordings have there."""
    assert node.recording is not None
    if not node.recording.rebinds_tensors or tree.backend.rebinds_to_pool:
        return True
    return not any(tree.pool.find(move.tensor.data_ptr()) for move in moves)


def _bind(
    captured: Captured, entry: Entry, node: Node, values: tuple[Any, ...], leaves: list[Leaf], tree: Tree,
    moves: Sequence[Move], others: Sequence[Move], *, outside: bool,
) -> tuple[Refusal | None, bool]:  # fmt: skip
    """Bind the recording to the new addresses: why it cannot be, and whether it had to learn how."""
    recording = node.recording
    assert recording is not None
    if not outside:
        return Refusal("it lies in the memory that recordings share", lasting=False), False
    beside = entry.looked_beside()
    if beside and (paths := tuple(move.path for move in moves if move.path in beside)):
        return Refusal("the body counts from where its storage begins", paths=paths), False
    try:
        if recording.rebind(moves):
            return None, False
        if node.groups:  # this rank alone would communicate once more, and the others wait for nobody
            return Refusal("a body that communicates cannot be compared with eager"), False
        refusal = _known(entry, recording, moves) or _learn(captured, entry, node, values, leaves, tree, moves, others)
        if refusal is None and not recording.rebind(moves):
            refusal = Refusal("its new address cannot be set", lasting=False)
    except RuntimeError as error:  # some parameters may be set: this recording is not to run again
        let_through(error)
        refusal = Refusal(f"the driver refuses: {error}")
    return refusal, True


def _known(entry: Entry, recording: Recording, moves: Sequence[Move]) -> Refusal | None:
    """Binding one of these tensors was refused before."""
    for move in moves:
        if move.path in entry.unbindable and move.path not in recording.copied_paths:
            return evolve(entry.unbindable[move.path], paths=(move.path,))
    return None


def _learn(
    captured: Captured, entry: Entry, node: Node, values: tuple[Any, ...], leaves: list[Leaf], tree: Tree,
    moves: Sequence[Move], others: Sequence[Move],
) -> Refusal | None:  # fmt: skip
    assert node.recording is not None
    call = captured.call(values, leaves, entry)
    if not tree.may_record(captured.log):
        return Refusal("its pool was given up", lasting=False)
    tree.recording = True
    try:
        refusal = locked(_calibrate, captured, entry, node, call, tree, moves, others)
    finally:
        tree.recording, tree.pool_is_at = False, None
    tree.put_away(captured.log, "a second capture")
    return refusal


def _calibrate(
    captured: Captured, entry: Entry, node: Node, call: Call, tree: Tree, moves: Sequence[Move], others: Sequence[Move]
) -> Refusal | None:
    assert node.recording is not None
    with captured.log.timed("calibrate") as timed:
        tree.before_recording(captured.log)
        refusal = node.recording.learn(call, moves, others, generators_of(call, entry))
        timed.detail = refusal.reason if refusal is not None else ", ".join(move.path for move in moves[:_NAMED])
    return refusal


def _drop(captured: Captured, entry: Entry, node: Node, moves: Sequence[Move], refusal: Refusal) -> None:
    """Record again at the new addresses. What cannot be bound in principle is not tried again."""
    bound = {input_.path for input_ in node.bound}
    in_vain = node.moving | entry.looked_beside()
    for move in moves:
        entry.moves[move.path] = entry.moves.get(move.path, 0) + (MOVES if move.path in bound else 1)
        if move.path in in_vain:
            entry.moves_in_vain[move.path] = entry.moves_in_vain.get(move.path, 0) + 1
    if node in entry.nodes:
        entry.nodes.remove(node)
    if node.tree is not None:
        node.tree.forget(node)
    captured.log.add("miss", f"{_text(moves)}: {refusal.reason}")
    _note_moved(captured, [move for move in moves if move.path not in bound])
    if refusal.environment:
        captured.note_findings(compile_plan(captured.annotation, captured.bare_facts(unpatchable=refusal.reason)))
        return
    about = refusal.paths or tuple(move.path for move in moves)
    if refusal.lasting:
        entry.unbindable.update(dict.fromkeys(about, refusal))
    unbound = tuple(Unbound(path=path, reason=refusal.reason, kernel=refusal.kernel) for path in about)
    captured.note_findings(compile_plan(captured.annotation, captured.bare_facts(unbound=unbound)))


def _given_up(captured: Captured, entry: Entry, moves: Sequence[Move]) -> CapturePlan | None:
    """No copy helps against these moves, as kernels that no operator tells of may read the tensor, or the body looks at
    its storage by numbers: after as many recordings as there may be, the key runs eagerly, by the plan given.

    Recordings that were made before it was known that the tensor moves do not count: each thread may have one."""
    most = captured.annotation.max_recordings
    path = next((move.path for move in moves if entry.moves_in_vain.get(move.path, 0) >= most), None)
    if path is None:
        return None
    beside = path in entry.looked_beside()
    why = "the body counts from where its storage begins" if beside else "kernels that no operator tells of may read it"
    difference = f"{path!r} is at another address in every call, and {why}"
    limit = LimitReached(num_recordings=entry.moves_in_vain[path], difference=difference)
    return compile_plan(captured.annotation, captured.bare_facts(limit=limit))


def distrust(captured: Captured, entry: Entry, node: Node, moves: Sequence[Move], reason: str) -> None:
    """A replay at the new addresses was not found to be eager's: this table is not used again."""
    assert node.recording is not None
    kernels = node.recording.kernels_using([move.path for move in moves])
    _drop(captured, entry, node, moves, Refusal(reason, kernel=", ".join(kernels[:_NAMED]) or None))


def _settle(node: Node, moves: Sequence[Move], leaves: Sequence[Any]) -> None:
    """Have the guards expect these tensors at these addresses from now on."""
    node.statics.update({move.path: move.tensor for move in moves if move.was is not None})
    if node.program is not None:
        node.program.follow(node.statics)
    node.guard.follow({move.path: move.tensor for move in moves if move.was is not None}, leaves)


def _note_moved(captured: Captured, moves: Sequence[Move]) -> None:
    where = source_location.user_location()
    moved = tuple(
        Moved(path=move.path, before_addr=move.before, after_addr=move.tensor.data_ptr(), where=where) for move in moves
    )
    captured.note_findings(compile_plan(captured.annotation, captured.bare_facts(moved=moved)))


def _text(moves: Sequence[Move]) -> str:
    named = [f"{move.path} {move.before:#x} -> {move.tensor.data_ptr():#x}" for move in moves[:_NAMED]]
    return ", ".join(named) + (f" and {len(moves) - _NAMED} more" if len(moves) > _NAMED else "")
