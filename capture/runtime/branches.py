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

from typing import Any, cast

import torch
from attrs import evolve, frozen
from typing_extensions import override

from capture.autograd.saved_graph import ForwardOutputs
from capture.core.facts import Facts
from capture.engines.base import SegmentedRecording
from capture.engines.registry import backend_for
from capture.engines.undo import Undo
from capture.key.signature import Leaf
from capture.native import native
from capture.observe.returned_value import put, returned_at
from capture.runtime.captured import Captured
from capture.runtime.entry import MOST_BRANCHES, Entry
from capture.runtime.replay import Commit
from capture.state.body_run import BodyRun
from capture.tree.node import Node
from capture.tree.tree import Tree

Reads = tuple[str, ...]


def may_follow(captured: Captured, entry: Entry) -> bool:
    """Recordings for this entry may have breaks."""
    backend = entry.backend
    is_whole = entry.region is None and not captured.is_backward
    return backend is not None and backend.breaks_at_reads and (is_whole or backend.executes_recording_runs)


def followed(captured: Captured, entry: Entry, facts: Facts) -> Facts:
    """Facts of a run with the branch it took; with none, where its reads are not followed."""
    return explained(facts, follows=may_follow(captured, entry))


def explained(facts: Facts, *, follows: bool | None = None) -> Facts:
    """The same for a run that is only explained. ``follows``: the engine does."""
    if not facts.host_syncs:
        return facts
    devices = [one for one in facts.devices if not one.startswith(("cpu", "meta"))] or ["cpu"]
    backend = backend_for(torch.device(devices[0]))
    follows = backend is not None and backend.breaks_at_reads if follows is None else follows
    compared = all(one.is_compared and devices[0].startswith(one.device) for one in facts.host_syncs)
    may_be_apart = backend is not None and backend.executes_recording_runs and not facts.gradient_obstacles
    if compared and follows and not facts.collectives and (may_be_apart or not facts.gradients):
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


class _Walk(Commit):
    """One replay, segment by segment."""

    __slots__ = ("is_last", "read", "stopped", "undo")

    def __init__(self, captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> None:
        super().__init__(captured, node, tree, values, leaves)
        self.undo, self.is_last, self.read = Undo(), False, None
        if node.program is not None:  # that of another branch may ask for it
            self.begin_state = torch.default_generator.get_state()
        self.stopped: Followed | None = None

    def walk(self) -> None:
        """Run segments up to the last one, or to where no recording goes on."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._walk()
        else:
            self._walk()

    def _walk(self) -> None:
        node, leaves, number = self.node, self.leaves, 0
        recording = _recording(node)
        recording.keep(self.undo, leaves)
        while number < len(node.reads):  # what is returned is read last
            recording.segment(number)(leaves)
            found = recording.meet(number, leaves)
            if found.told != node.reads[number]:
                reads = (*node.reads[:number], found.told)
                moved, other = _other(node, self.tree, reads, leaves)
                if other is None:
                    self.stopped = Followed(reads=reads, moved=moved)
                    return
                self.node = node = other
                recording = _recording(node)
                recording.keep(self.undo, leaves)
            if found.made:
                recording.settle(number, found)
            self.read = found.value
            number += 1
        self.is_last = True
        native.committed(recording.segment(number), (leaves,), bool)

    @override
    def finish(self, ended: bool) -> Any:
        """A call that came to its last segment has happened; else all is put back."""
        if ended and self.is_last:
            return Followed(node=self.node, result=super().finish(ended))
        if not self.was_stopped():
            self.undo.put_back()
        return self.stopped

    @override
    def _built(self) -> Any:
        result, place = super()._built(), returned_at(self.node.reads)
        if place is None:
            return result
        if type(result) is ForwardOutputs:
            return result.with_result(put(result.result, place, self.read))
        return put(result, place, self.read)

    @override
    def give_up(self) -> None:
        if not self.is_last:
            self.undo.put_back()

    @override
    def resumed(self, error: BaseException, run: BodyRun | None) -> Any:
        return Followed(node=self.node, result=super().resumed(error, run))


def replay(
    captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], run: BodyRun | None
) -> Followed:
    """Begin with a recording that fits, and go on with those that were recorded after what the host reads."""
    walk = _Walk(captured, node, tree, values, leaves)
    found: Followed = walk.run(walk.walk, (), run)
    return found


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


def begin_alike(entry: Entry, node: Node, tree: Tree) -> None:
    """Recordings of one body are to begin alike: older ones that do not are made again, the first times that this
    happens, as a pool grows while the first of them are made."""
    for other in _join(node):
        if entry.steadiness.parted < MOST_BRANCHES and other.tree is tree:
            entry.steadiness.parted += 1
            if other in entry.nodes:
                entry.nodes.remove(other)
            tree.forget(other)


def _join(node: Node) -> list[Node]:
    """A recording with breaks came beside others: note where one may go on from the other. Gives those with which that
    is impossible, as the pool was another one when they were made."""
    assert node.parent is not None
    apart = []
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
        else:
            apart.append(other)
    return apart
