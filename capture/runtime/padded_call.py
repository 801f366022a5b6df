"""Padded calls: a call whose tensors are padded to a size that is recorded (``buckets=``).

Nothing of a padded run is the call but a replay that was compared with the body at this size: what is watched and
recorded before that is undone. `buckets` pads and cuts off, `bucket_proof` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from capture.core.config import current as current_config
from capture.core.errors import UncapturableError
from capture.core.facts import BucketRefusal
from capture.core.interrupts import let_through
from capture.engines.base import Move
from capture.guards.guard import OVERLAPS
from capture.key.modes import Here
from capture.native import MISS
from capture.rules.compile_plan import compile_plan
from capture.runtime import branches, bucket_proof, eviction, rebind
from capture.runtime.bucket_proof import NOT_RECORDED, PaddedCall, PaddedNode
from capture.runtime.buckets import Count, Size, Trim, Values, way_of
from capture.runtime.captured import Captured
from capture.runtime.checked_replay import verifies
from capture.runtime.eager_call import run_eagerly, warm_up
from capture.runtime.entry import MOST_BRANCHES, RETRIES
from capture.runtime.fast_path import Shortcuts
from capture.runtime.matching import engine_of, find_entry, fitting, made_since
from capture.runtime.replay import replay
from capture.runtime.replay_apart import GoesOnApart
from capture.runtime.state_changes import after_move
from capture.runtime.undone_runs import bring_to_replay
from capture.runtime.verdict import Verdict
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.torch_private.distributed import groups_exist
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree

_MOST_WAYS = 4  # of one size: for some modes or plain values each


def replay_padded(captured: Captured, values: Values, now: Here, size: Size) -> Any:
    """Replay a padded call that was compared with the body at this size, or compare it now. Nothing of a padded run is
    the call but such a replay: watched and recorded, it is undone. ``MISS``: the call keeps its own size."""
    padded = PaddedCall.of(captured, values, size)
    outer, inner = body_run.current(), BodyRun()
    communicates = None if outer is None else _communicates(captured)
    if outer is None or communicates is None:
        return MISS
    if communicates:
        _not_padded(captured, padded.refusal("communicates"))
        size.let_rest()
        return MISS
    for _ in range(RETRIES + 1):
        try:
            outcome = body_run.during(inner, _padded_node, (captured, padded, now))
        except Exception as error:
            let_through(error)
            if inner.error is not error:
                raise
            outcome = padded.refusal("raises", detail=f"{type(error).__name__}: {error}")
        if outcome is not None:
            break
    if isinstance(outcome, Tree):
        return warm_up(captured, padded.call, outcome)
    if not isinstance(outcome, PaddedNode):
        if outcome is not None:
            _not_padded(captured, outcome)  # raises as often as it is asked where the annotation says so
        size.let_rest()
        return MISS
    if outcome.node.reads:
        return _read_padded(captured, padded, outcome)
    proof, count = outcome.node.proofs.get(padded.proof), size.counts.setdefault(padded.proof, Count())
    always = "always" in (captured.annotation.verify, current_config().verify)
    if proof is None or count.is_due or always or outcome.learned:
        return _compare(captured, padded, outcome, count)
    count.calls += 1
    result = _replay_padded(captured, padded, outcome, proof, outer)
    if captured.annotation.verify != "always":
        _add_way(captured, padded, outcome, proof, count, now)
    return result


def _communicates(captured: Captured) -> bool | None:
    """The body has collectives. Other ranks would take those of runs that are undone for their own. None: a call of its
    own size has to tell first."""
    plans = [plan for entry in captured.entries() for plan in entry.plans()]
    if any(plan.collectives for plan in plans):
        return True
    return False if plans or not groups_exist() else None


def _padded_node(captured: Captured, padded: PaddedCall, now: Here) -> PaddedNode | BucketRefusal | Tree | None:
    """The recording that a padded call is a replay of, made where there is none; or why there is none. A tree: its step
    warms up. None: look again."""
    entry, leaves = find_entry(captured, padded.values, now.ambient)
    padded.leaves = leaves
    backend = engine_of(captured, entry, leaves)
    if backend is None or backend.in_capture() or entry.phase == "eager":
        return NOT_RECORDED
    if entry.region is not None:
        return padded.refusal("gradients")
    tree = tree_for(backend, captured.pool.number)
    tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    if tree.lingering:
        tree.let_go()
    if tree.warm:
        return tree
    node = fitting(captured, entry, tree, tree.pattern(leaves)) if entry.phase == "ready" else None
    learned: Sequence[Move] = ()
    if node is None:
        if not captured.budget.allows(entry.key) or not eviction.makes_room(captured, entry, tree):
            return NOT_RECORDED
        call, nodes_before = captured.call(padded.values, leaves), tuple(entry.nodes)
        is_made = lambda: made_since(nodes_before, entry, tree) is not None  # noqa: E731
        bring_to_replay(captured, entry, call, tree, is_made, with_gradients=False)
        node = made_since(nodes_before, entry, tree)
        if node is None:
            return padded.refusal("gradients") if entry.in_use().region is not None else NOT_RECORDED
    elif (state := node.check(leaves)) == OVERLAPS:
        return NOT_RECORDED
    elif state:
        reply = rebind.state_moved(captured, entry, node, padded.values, leaves, tree)
        captured.clear_fast_paths()
        if reply.verdict is not Verdict.REPLAY:
            after_move(captured, entry, node, padded.values, leaves, tree, reply)
            return None
        learned = reply.learned
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    return padded.fits(entry, node, tree, learned)


def _compare(captured: Captured, padded: PaddedCall, fit: PaddedNode, count: Count) -> Any:
    """The body's own result. A padded replay runs before it, and is taken back."""
    proved = bucket_proof.compared(captured, padded, fit)
    entry, node = fit.entry, fit.node
    if proved.refusal is not None and fit.learned:
        rebind.distrust(captured, entry, node, fit.learned, f"{proved.refusal.path} differs at the new address")
    elif proved.refusal is not None:
        node.proofs[padded.proof] = proved.refusal
        captured.clear_fast_paths()
        try:
            _not_padded(captured, proved.refusal)
        except UncapturableError:
            proved.take_back()
            raise
        padded.size.let_rest()
    elif proved.is_silent:
        padded.size.let_rest()
    elif proved.trim is not None:
        node.proofs[padded.proof] = proved.trim
        padded.size.is_proven()
        count.compared()
    return proved.result


def _read_padded(captured: Captured, padded: PaddedCall, fit: PaddedNode) -> Any:
    """Where the body reads values on the host, only the replay tells which recording gives the result. The body changes
    nothing, so it may run after that."""
    entry, size, inner = fit.entry, padded.size, BodyRun()
    try:
        where = captured, fit.node, fit.tree, padded.values, padded.leaves, inner
        followed = branches.replay(*where, resumes=False)
    except Exception as error:
        let_through(error)
        if inner.error is not error:
            raise
        return run_eagerly(captured, padded.call, "an operator raised")
    if followed.node is None:
        if followed.moved is not None or len(entry.branches) >= MOST_BRANCHES:
            size.let_rest()
            return MISS
        call, nodes_before = captured.call(padded.values, padded.leaves, entry), tuple(entry.nodes)
        parts = captured, entry, call, fit.tree, lambda: made_since(nodes_before, entry, fit.tree) is not None
        body_run.during(BodyRun(), bring_to_replay, parts)
        return run_eagerly(captured, padded.call, "the host read a value for the first time")
    proof, count = followed.node.proofs.get(padded.proof), size.counts.setdefault(padded.proof, Count())
    if isinstance(proof, BucketRefusal):
        size.let_rest()
        return run_eagerly(captured, padded.call, "padding shows after what the host read")
    if proof is None or count.is_due or verifies(captured):
        return _compare(captured, padded, evolve(fit, node=followed.node, given=(followed.result,)), count)
    entry.steadiness.replays += 1
    count.calls += 1
    return proof(followed.result)


def _replay_padded(captured: Captured, padded: PaddedCall, fit: PaddedNode, trim: Trim, outer: BodyRun) -> Any:
    """Replay a padded call as the caller's call, and trim its result."""
    outer.replayed, inner = True, BodyRun()
    try:
        where = captured, fit.node, fit.tree, padded.values, padded.leaves, inner
        result = trim(replay(*where, resumes=not fit.is_pure))
    except Exception as error:
        let_through(error)
        outer.error = error if inner.error is error else None
        outer.replayed = inner.replayed
        if outer.error is None or not fit.is_pure:
            raise
        outer.error = None  # eager's own error tells of the sizes that the caller gave
        return run_eagerly(captured, padded.call, "an operator raised")
    outer.replay(result)
    return result


def _add_way(
    captured: Captured, padded: PaddedCall, proved: PaddedNode, trim: Trim, count: Count, now: Here
) -> None:  # fmt: skip
    """The next call like this one may take a fast path, if every recording that it may come to was compared."""
    size, entry = padded.size, proved.entry
    if any(node.proofs.get(padded.proof) is None for node in entry.nodes):
        return
    paths = [path for path, _ in padded.call.paths()]
    shortcuts = Shortcuts()
    way = way_of(
        entry, padded.tensors, padded.call.leaves, paths, proved.node, count, shortcuts, is_pure=proved.is_pure
    )
    if way is None:
        return
    shortcuts.add(captured, padded.values, padded.leaves, entry, now, GoesOnApart(captured, trim))
    size.ways[:] = [way for way in size.ways if way.entry is not entry or way.nodes == entry.nodes][-_MOST_WAYS:]
    size.ways.insert(0, way)


def _not_padded(captured: Captured, refusal: BucketRefusal) -> None:
    """Say once why calls keep their own sizes."""
    if refusal is not NOT_RECORDED:
        plan = compile_plan(captured.annotation, captured.bare_facts(bucket=refusal))
        captured.report(plan, "keeps its own size")
