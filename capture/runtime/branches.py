"""Branches: one function as a tree of its own, where the host reads values in the middle of its body.

``if y.sum() > 0: ...`` ends a segment. Which segment follows is known once the value was read:

    1 -> 2 -> 4        a recording of the run that read True
    1 -> 3 -> 4        a recording of the run that read False

A **branch** is what the host read, in order. Each has facts and a plan of its own, as a run goes another way after
another value, and is watched once before it is recorded. A recording begins with the body: what two of them have in
common lies in both, at the same addresses, so that a replay may begin in the one and go on in the other
(``Recording.joins``). Where a value was never read before, what the segments wrote is put back, and dispatch has the
call watched or recorded. So a call either was a replay, or has not happened.

A read that gives another value in call after call, such as a loss for the log, ends in no replay at all:
``Steadiness`` counts, and the function runs eagerly then.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from attrs import evolve, frozen

from capture.core.facts import Facts
from capture.engines.base import SegmentedRecording
from capture.engines.registry import backend_for
from capture.engines.undo import Undo
from capture.key.signature import Leaf
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.replay import build_result
from capture.state import body_run
from capture.tree.node import Node
from capture.tree.tree import Tree

Reads = tuple[str, ...]


def may_follow(captured: Captured, entry: Entry) -> bool:
    """Recordings for this entry may have breaks."""
    backend = entry.backend
    return backend is not None and backend.breaks_at_reads and entry.region is None and not captured.is_backward


def followed(captured: Captured, entry: Entry, facts: Facts) -> Facts:
    """Facts of a run with the branch it took; with none, where its reads are not followed."""
    return explained(facts, follows=may_follow(captured, entry))


def explained(facts: Facts, *, follows: bool | None = None) -> Facts:
    """The same for a run that is only explained. ``follows``: the engine does."""
    if not facts.host_syncs:
        return facts
    if follows is None:
        devices = [one for one in facts.devices if not one.startswith(("cpu", "meta"))] or ["cpu"]
        backend = backend_for(torch.device(devices[0]))
        follows = backend is not None and backend.breaks_at_reads
    compared = all(one.is_compared for one in facts.host_syncs)
    if compared and follows and not facts.gradients and not facts.collectives:
        return facts
    syncs = {(one.where, one.data_dependent_shape): evolve(one, is_compared=False) for one in facts.host_syncs[::-1]}
    return evolve(facts, host_syncs=tuple(syncs.values())[::-1], reads=())


@frozen(eq=False)
class Followed:
    """How far recordings went. ``result`` counts if ``node`` is there: the recording that gave it."""

    node: Node | None = None
    result: Any = None
    reads: Reads = ()
    """What was read, where no recording goes on; nothing has happened then."""
    moved: Node | None = None
    """This one would, but its state is elsewhere, or is another."""


def replay(captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> Followed:
    """Begin with a recording that fits, and go on with those that were recorded after what the host reads."""
    run = body_run.current()
    if run is not None:
        run.replayed = True
    found = _run(node, tree, leaves)
    if found.node is None:
        if run is not None:
            run.replayed = False
        return found
    return evolve(found, result=build_result(captured, found.node, tree, values, leaves))


def _run(node: Node, tree: Tree, leaves: list[Leaf]) -> Followed:
    undo, recording = Undo(), _recording(node)
    reads: Reads = ()
    recording.keep(undo, leaves)
    for number in itertools.count():
        recording.run_segment(number, leaves)
        if number == len(node.reads):
            return Followed(node=node)
        found = recording.meet(number, leaves)
        reads = (*reads, found.told)
        if found.told != node.reads[number]:
            moved, other = _other(node, tree, reads, leaves)
            if other is None:
                undo.put_back()
                return Followed(reads=reads, moved=moved)
            node, recording = other, _recording(other)
            recording.keep(undo, leaves)
        recording.settle(number, found)
    raise AssertionError("there is a last segment")


def _recording(node: Node) -> SegmentedRecording:
    assert node.recording is not None
    return cast(SegmentedRecording, node.recording)


def _other(node: Node, tree: Tree, reads: Reads, leaves: list[Leaf]) -> tuple[Node | None, Node | None]:
    """The recording that goes on after these reads; one that would, but for its state."""
    moved = None
    for other in tree.current.children.get(node.key, ()):
        if other.reads[: len(reads)] != reads or other.number not in node.joined or not fits(other, tree):
            continue
        if not other.check(leaves):
            return None, other
        moved = other
    return moved, None


def fits(node: Node, tree: Tree) -> bool:
    """Memory is as it has to be for this recording."""
    return (not node.dead_before or node.may_run()) and node.recording is not None and tree.is_clear(node)


def join(node: Node) -> None:
    """A recording with breaks came beside others: note where one may go on from the other."""
    assert node.parent is not None
    for other in node.parent.children[node.key] if node.reads else ():
        if other is node or other.recording is None or node.recording is None:
            continue
        same = 0
        while same < min(len(node.reads), len(other.reads)) and node.reads[same] == other.reads[same]:
            same += 1
        parted = min(same + 1, len(node.reads), len(other.reads))
        if parted and _recording(node).joins(other.recording, parted):
            node.joined.add(other.number)
            other.joined.add(node.number)
