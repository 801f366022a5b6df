"""What operators read and wrote, and the words of their nodes' parameters -> nodes with the memory that each touches.

An operator's schema names its tensors; kernels get more: workspaces, tables of addresses, the state of generators. All
of it comes by an address in their parameters. A word that lies in none of the operator's tensors, but in memory that is
known, makes its node touch the whole block around it, as if it wrote it. Words that are no addresses may look like one:
that only orders more than is needed.

Memory that an operator takes and gives back before it ends is seen by nobody. A word in it tells where it lies: between
the blocks that were alive before and after the operator.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from attrs import field

from capture.core.data import frozen
from capture.schedule.dependencies import Node, Span


@frozen
class OperatorMemory:
    """One operator of a capture."""

    name: str
    first: int
    """Number of the first node."""
    end: int
    """Number after that of the last node."""
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    is_barrier: bool = False
    hidden: int = 0
    """Number of blocks that it allocated besides its results."""


@frozen
class Lifetime:
    """A block of the recording's own memory: from the operator that made it to the first one that it was gone in."""

    begin: int
    end: int
    born: int
    died: int | None = None


@frozen(eq=False)
class Memory:
    """Tells what memory an address lies in."""

    parts: Sequence[Span]
    """The recording's own memory: begin and end of each part of it."""
    lifetimes: Sequence[Lifetime]
    block_of: Callable[[int], Span | None]
    """The block that an address outside of it lies in; None if it is no address."""
    _begins: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "parts", sorted(self.parts))
        object.__setattr__(self, "_begins", [begin for begin, _ in self.parts])

    def own_part(self, address: int) -> Span | None:
        """The part of the recording's own memory that holds the address."""
        at = bisect.bisect_right(self._begins, address) - 1
        return self.parts[at] if at >= 0 and address < self.parts[at][1] else None

    def around(self, address: int, operator: int, part: Span) -> Span:
        """What an operator, by its number, can have got with this address: a block that outlived it, or all memory
        between such blocks."""
        begin, end = part
        for lifetime in self.lifetimes:
            if lifetime.born >= operator or (lifetime.died is not None and lifetime.died <= operator):
                continue
            if lifetime.begin <= address < lifetime.end:
                return lifetime.begin, lifetime.end
            if lifetime.end <= address:
                begin = max(begin, lifetime.end)
            else:
                end = min(end, lifetime.begin)
        return begin, end


def accesses(
    words: Sequence[Collection[int] | None], operators: Sequence[OperatorMemory], memory: Memory
) -> list[Node]:  # fmt: skip
    """``words``: of each node's parameters, read 8 bytes at a time; None of a node that nobody can tell anything of.
    The ``operators`` are in order; a node that belongs to none is a barrier."""
    owner: list[int | None] = [None] * len(words)
    for number, operator in enumerate(operators):
        for node in range(operator.first, min(operator.end, len(words))):
            owner[node] = None if owner[node] is not None else number
    hidden = [_hidden(operator, number, words, memory) for number, operator in enumerate(operators)]
    nodes = []
    for at, parameter_words in enumerate(words):
        whose = owner[at]
        touched = None if whose is None or parameter_words is None else hidden[whose].get(at)
        if whose is None or touched is None or operators[whose].is_barrier:
            nodes.append(Node(len(operators) + at, is_barrier=True))
        else:
            nodes.append(Node(whose, operators[whose].reads, (*operators[whose].writes, *sorted(touched))))
    return nodes


def _hidden(
    operator: OperatorMemory, number: int, words: Sequence[Collection[int] | None], memory: Memory
) -> dict[int, set[Span]]:  # fmt: skip
    """Memory that an operator's nodes touch outside of its tensors. Empty where it allocated memory of which no node
    has an address."""
    spans = sorted((*operator.reads, *operator.writes))
    begins = [begin for begin, _ in spans]
    ends: list[int] = []
    for _, end in spans:
        ends.append(max(end, ends[-1] if ends else end))
    hidden: dict[int, set[Span]] = {}
    seen = 0
    for node in range(operator.first, min(operator.end, len(words))):
        touched = hidden[node] = set()
        for word in _unknown(words[node] or (), begins, ends, spans):
            part = memory.own_part(word)
            block = memory.around(word, number, part) if part is not None else memory.block_of(word)
            seen += part is not None
            if block is not None:
                touched.add(block)
    return {} if operator.hidden and not seen else hidden


def _unknown(words: Iterable[int], begins: list[int], ends: list[int], spans: list[Span]) -> Iterator[int]:
    """Words that lie in none of these ranges, which are in the order of their begins. ``ends``: the furthest so far."""
    for word in words:
        if not _LEAST <= word < _MOST:
            continue
        at = bisect.bisect_right(begins, word) - 1
        while at >= 0 and ends[at] > word >= spans[at][1]:
            at -= 1
        if at < 0 or ends[at] <= word:
            yield word


_LEAST, _MOST = 1 << 16, 1 << 57  # addresses of a process lie between these
