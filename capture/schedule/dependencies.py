"""Nodes in the order they were recorded in -> the edges that their memory asks for.

A capture on one stream is a chain: each node waits for the one before it. The data asks for less. A node has to come
after the last one that wrote what it reads (read after write), after all that read what it writes (write after read),
and after the last one that wrote what it writes (write after write). Nodes of one operator stay a chain, as what a
library does between its own kernels is not known. A barrier comes after all before it and before all after it.

An edge that follows from others is left out: a graph with fewer edges is launched and run faster. A node's ancestors
are kept as the bits of one number, so that 1,000 nodes take some 10 ms.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from attrs import field

from capture.core.data import define, frozen

Span = tuple[int, int]
"""Addresses from the first number up to the second one, which is left out."""
Edge = tuple[int, int]
"""Numbers of two nodes: the second one waits for the first."""


@frozen
class Node:
    """One node of a graph."""

    operator: int
    """Equal for all nodes of one operator, which follow each other."""
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    """Ranges that it writes, or reads and writes."""
    is_barrier: bool = False
    """Which memory it touches is not known, so it comes after all nodes before it and before all after it."""


@frozen
class Dependencies:
    """Which nodes wait for which others."""

    edges: tuple[Edge, ...]
    """Edges of which none follows from others, sorted by the node that waits, then by the other one."""
    levels: tuple[int, ...]
    """For each node, the number of nodes before it on the longest path to it."""

    @property
    def longest(self) -> int:
        """The number of nodes on the longest path."""
        return max(self.levels, default=-1) + 1

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of nodes on each level."""
        counts = [0] * self.longest
        for level in self.levels:
            counts[level] += 1
        return tuple(counts)

    @property
    def width(self) -> int:
        """The largest number of nodes on one level."""
        return max(self.widths, default=0)

    def path(self) -> tuple[int, ...]:
        """The nodes on one longest path, in order."""
        before: dict[int, int] = {}
        for first, then in self.edges:
            if self.levels[first] == self.levels[then] - 1:
                before.setdefault(then, first)
        at = max(range(len(self.levels)), key=self.levels.__getitem__, default=None)
        nodes: list[int] = []
        while at is not None:
            nodes.append(at)
            at = before.get(at)
        return tuple(reversed(nodes))


@define
class _Part:
    """A range of addresses that all nodes so far touched as a whole."""

    end: int
    writer: int | None = None
    readers: list[int] = field(factory=list)
    """Nodes that read it since it was written."""


class _Memory:
    """Which nodes touched which addresses last. Its parts are disjoint and in ascending order."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._parts: list[_Part] = []

    def read(self, node: int, span: Span) -> Iterator[int]:
        """The nodes that a read of this range has to come after."""
        for part in self._cover(span):
            if part.writer is not None:
                yield part.writer
            if not part.readers or part.readers[-1] != node:
                part.readers.append(node)

    def write(self, node: int, span: Span) -> Iterator[int]:
        """The nodes that a write of this range has to come after."""
        begin, end = span
        for part in self._cover(span):
            if part.writer is not None:
                yield part.writer
            yield from part.readers
        first, last = bisect.bisect_left(self._begins, begin), bisect.bisect_left(self._begins, end)
        self._begins[first:last], self._parts[first:last] = [begin], [_Part(end, node)]

    def _cover(self, span: Span) -> list[_Part]:
        """Parts that make up exactly this range: those at its ends are cut, gaps are filled."""
        begin, end = span
        self._cut(begin)
        self._cut(end)
        at = bisect.bisect_left(self._begins, begin)
        position, parts = begin, []
        while position < end:
            is_covered = at < len(self._begins) and self._begins[at] < end
            following = self._begins[at] if is_covered else end
            if position < following:
                self._insert(at, position, _Part(following))
            parts.append(self._parts[at])
            position = self._parts[at].end
            at += 1
        return parts

    def _cut(self, address: int) -> None:
        at = bisect.bisect_left(self._begins, address) - 1
        if at >= 0 and address < self._parts[at].end:
            whole = self._parts[at]
            self._insert(at + 1, address, _Part(whole.end, whole.writer, list(whole.readers)))
            whole.end = address

    def _insert(self, at: int, begin: int, part: _Part) -> None:
        self._begins.insert(at, begin)
        self._parts.insert(at, part)


def dependencies(nodes: Sequence[Node]) -> Dependencies:
    """The edges between these nodes, given in recorded order.

    Raises ``ValueError`` for a range that ends before it begins. An empty one touches nothing.
    """
    memory, barrier = _Memory(), None
    edges: list[Edge] = []
    ancestors: list[int] = []  # as bits: the nodes that each one comes after
    levels: list[int] = []
    for number, node in enumerate(nodes):
        wanted = set(_conflicts(memory, number, node))
        if barrier is not None:
            wanted.add(barrier)
        if number and nodes[number - 1].operator == node.operator:
            wanted.add(number - 1)
        if node.is_barrier:
            wanted.update(range(barrier or 0, number))
            barrier = number
        kept, before = _direct(wanted, ancestors)
        edges += [(before, number) for before in kept]
        ancestors.append(before)
        levels.append(1 + max((levels[before] for before in kept), default=-1))
    return Dependencies(tuple(edges), tuple(levels))


def _conflicts(memory: _Memory, number: int, node: Node) -> Iterator[int]:
    """Earlier nodes that touched the memory of this one. Its own accesses are noted, too."""
    earlier: set[int] = set()
    for spans, touch in ((node.reads, memory.read), (node.writes, memory.write)):
        for begin, end in spans:
            if begin > end:
                raise ValueError(f"a range ends at {end:#x}, before it begins at {begin:#x}")
            if begin < end:
                earlier.update(touch(number, (begin, end)))
    return iter(earlier - {number})


def _direct(wanted: Iterable[int], ancestors: Sequence[int]) -> tuple[list[int], int]:
    """The nodes that no other of these comes after, in order, and all nodes before them as bits."""
    kept: list[int] = []
    before = 0
    for earlier in sorted(wanted, reverse=True):  # a node that comes after it has a higher number
        if not before >> earlier & 1:
            kept.append(earlier)
            before |= ancestors[earlier] | 1 << earlier
    return kept[::-1], before
