"""Eviction: which recording gives its place to another one.

A function has at most ``max_recordings`` recordings below one node. A key that comes when all places are taken gets the
place of the recording that was not used for longest, once it was asked for ``LEAST`` times while that one was not used
at all. So a shape that is hot displaces one that was only used at the beginning, and shapes that alternate do not
displace each other: of six in turn and five places, the sixth runs eagerly.
"""

from __future__ import annotations

from capture.native import native
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.tree.node import Node
from capture.tree.tree import Tree

LEAST = 8


def makes_room(captured: Captured, entry: Entry, tree: Tree) -> bool:
    """There is a place for a recording of this entry below the tree's current node, which may be another one's."""
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


def evict(captured: Captured, node: Node, tree: Tree) -> None:
    """Drop a recording, and those below it. Its plan stays."""
    for entry in captured.entries():
        if node in entry.nodes:
            entry.nodes.remove(node)
    captured.log.counters.evictions += 1
    captured.log.add("drop", f"not used for {native.runs() - node.last_used} replays: its place is another one's")
    tree.forget(node)


def _siblings(captured: Captured, tree: Tree) -> list[Node]:
    return [node for nodes in tree.current.children.values() for node in nodes if node.function is captured]
