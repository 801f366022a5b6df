"""Eviction: which recording gives its place to another one.

A function has at most ``max_recordings`` recordings below one node. A key that comes when all places are taken gets the
place of the recording that was not used for longest, once it was asked for ``LEAST`` times while that one was not used
at all. So a shape that is hot displaces one that was only used at the beginning, and shapes that alternate do not
displace each other: of six in turn and five places, the sixth runs eagerly.

The recordings of all threads together have limits, too (``config.max_recordings``, ``config.memory_limit``), which hold
at the end of every call. A thread cannot take what another one runs: it asks for it, and the other lets go at its next
call. A recording that would exceed the limit of memory, as far as a watched run tells, is not made; one that
turns out larger goes, and it is known from then on how much it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import cast

from capture.core import config as _config
from capture.core.facts import MemoryForecast
from capture.core.findings import Policy
from capture.engines.base import SegmentedRecording
from capture.native import native
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.inputs import span_of
from capture.state.call import Call
from capture.tree.node import Node, walk
from capture.tree.thread_trees import bytes_of_others, others_beside, tree_for
from capture.tree.tree import Tree

_COPIED = (Policy.COPY, Policy.COPY_BACK)
LEAST = 8
GRAPH_NODE = 3072  # bytes of device memory that one kernel of an instantiated graph takes, measured on an H200


def makes_room(captured: Captured, entry: Entry, tree: Tree) -> bool:
    """Make place for a recording of this entry below the tree's current node, by dropping another one if need be. False
    if there is none."""
    if tree.current.counts.get(captured.number, 0) < captured.annotation.max_recordings:
        return True
    if not entry.asked:
        entry.asked_since = native.runs()
    entry.asked += 1
    if entry.asked < LEAST:
        return False
    coldest = min(_siblings(captured, tree), key=lambda node: node.last_used)
    since, entry.asked = entry.asked_since, 0
    if coldest.last_used > since:
        return False
    evict(captured, coldest, tree)
    return True


def _limit(tree: Tree) -> float:
    """Bytes that recordings of all threads may take on its device."""
    return _config.current().memory_of(tree.backend.memory_bytes())


def forecast(captured: Captured, entry: Entry, call: Call, tree: Tree) -> MemoryForecast | None:
    """How much memory a recording of this call would bring in use, if that is more than allowed. Graphs of other
    recordings are dropped first."""
    if not entry.needs:
        return None
    plan = entry.plan
    copied = (
        {placeholder.path for placeholder in plan.placeholders if placeholder.policy in _COPIED}
        if plan is not None
        else set()
    )
    own_bytes = entry.needs + sum(span_of(leaf) for path, leaf in call.paths() if path in copied)
    used = sum(block.nbytes for block, _ in tree.live_blocks())
    graph = GRAPH_NODE * entry.facts.num_ops if tree.backend.has_own_memory and entry.facts is not None else 0
    pool = max(tree.pool.reserved_bytes(), used + own_bytes)
    needed, limit = bytes_of_others(tree) + pool + graph, _limit(tree)
    if needed <= limit:
        return None
    return MemoryForecast(
        nbytes=needed, limit=int(limit), device=tree.backend.name, where=captured.annotation.defined_at
    )


def keep_within_limits(tree: Tree, entry: Entry, before: int) -> None:
    """After a recording: what was not used for longest goes, children before parents, as long as there are more
    recordings or bytes than there may be. Graphs give their bytes back at once; the pool, which all share, only as a
    whole: where it is too large by itself, all recordings of it go. ``entry`` was recorded; ``before``: bytes of the
    pool then."""
    tree.sweep()
    config, limit = _config.current(), _limit(tree)
    others, pool = bytes_of_others(tree), tree.pool.reserved_bytes()
    nodes = tree.recordings()
    beside = _bytes_beside(nodes)
    idle = sorted((node for node in nodes if node not in tree.path), key=lambda node: node.last_used)
    while beside and others + pool + beside > limit:
        last = next((node for node in idle if node.recording is not None and not node.children), None)
        if last is None:
            break
        evict(last.function, last, tree)
        beside = _bytes_beside(nodes)
    _keep_number(tree, config.max_recordings)
    if others + pool + beside > limit:
        for node in walk(tree.root):
            if node.log is not None:
                node.log.counters.evictions += 1
                node.log.add("drop", f"the pool takes {pool} bytes, and may take {limit - others:.0f}")
        if pool > before:  # this recording needed that much
            entry.needs = max(entry.needs, pool - sum(block.nbytes for block in tree.beside))
        tree.retire()
        pool = beside = tree.count = 0
    tree.nbytes = pool + beside


def _bytes_beside(nodes: Sequence[Node]) -> int:
    """Bytes that these recordings take beside the pool: graphs, and copies for undo, which those share that write the
    same memory."""
    recordings = [node.recording for node in nodes if node.recording is not None]
    kept = {cast(SegmentedRecording, recording).kept_places for recording in recordings if recording.reads}
    graphs = sum([recording.graph_bytes for recording in recordings])
    return graphs + sum([nbytes for places in kept for _, nbytes in places])


def _keep_number(tree: Tree, most: int) -> None:
    """The threads together have no more recordings on a device than this, those that go at a thread's next call left
    out."""
    trees = [tree, *others_beside(tree)]
    tree.count = len(tree.recordings())
    if sum(each_tree.count for each_tree in trees) <= most:
        return
    recorded = [(each_tree, node) for each_tree in trees for node in each_tree.recordings()]
    idle = sorted([pair for pair in recorded if pair[1] not in tree.path], key=lambda pair: pair[1].last_used)
    for _ in range(len(recorded) - most):
        last = next(((each_tree, node) for each_tree, node in idle if each_tree.is_leaf(node)), None)
        if last is None:
            break
        idle.remove(last)
        evict(last[1].function, last[1], last[0])
    for each_tree in trees:
        each_tree.count = len(each_tree.recordings())


def evict(captured: Captured, node: Node, tree: Tree) -> None:
    """Drop a recording, and those below it: of another thread's tree at that one's next call. Its plan stays."""
    for entry in captured.entries():
        if node in entry.nodes:
            with contextlib.suppress(ValueError):  # another thread may have removed it
                entry.nodes.remove(node)
            if not entry.nodes:
                captured.fast_paths.forget(entry.number)
    captured.log.counters.evictions += 1
    captured.log.add("drop", f"not used for {native.runs() - node.last_used} replays: its place is another one's")
    tree_for(tree.backend, tree.number).forget(node)


def _siblings(captured: Captured, tree: Tree) -> list[Node]:
    return [node for nodes in tree.current.children.values() for node in nodes if node.function is captured]
