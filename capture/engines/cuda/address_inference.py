"""Words: which parameters of a recorded graph hold the address of which tensor. Pure: numbers in, numbers out.

A value inside a tensor's memory may be a look-alike. It counts only if a second capture of the same body, with the
tensor elsewhere, has there the new address with the same offset, and if no other address differs between the two.
Words that are no addresses do differ: structures and functors passed by value have gaps that nobody fills, where
whatever the stack held last may be an address in one of the two captures (a broadcast addition on an H200: a heap
pointer in the first, the tensor's new begin in the second). What a kernel reads through is a tensor in both.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Literal

from attrs import evolve, field, frozen

NodeKind = Literal["kernel", "memcpy", "memset", "other"]


@frozen(eq=False)
class NodeWords:
    """One node's parameters."""

    kind: NodeKind
    same: tuple[object, ...]
    """What is equal in every capture of one body: the function, the grid, sizes."""
    words: tuple[int, ...]
    """The other parameters, read 8 bytes at a time."""
    filled: bool = False
    """No gaps: whoever launched this wrote every byte, so that any word that differs counts."""
    closed: str | None = None
    """Why nobody can tell what this node reads."""


@frozen
class Span:
    """A tensor's memory: where it was when the graph was recorded, and where it is now."""

    path: str
    begin: int
    nbytes: int
    now: int
    tied: bool = False
    """It keeps its distance from all others that are tied and share memory with it."""


@frozen
class Word:
    """The word of a node that holds ``offset`` bytes past the begin of the tensor at ``path``."""

    node: int
    index: int
    path: str
    offset: int


@frozen
class Unlike:
    """Why the captures differ by more than addresses. ``node``: where, if it is one place."""

    reason: str
    node: int | None = None


@frozen(eq=False)
class Places:
    """Finds the spans that a value lies in."""

    spans: Sequence[Span]
    _begins: list[int] = field(init=False)
    _longest: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        spans = sorted(self.spans, key=lambda one: one.begin)
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "_begins", [one.begin for one in spans])
        object.__setattr__(self, "_longest", max((one.nbytes for one in spans), default=0))

    def find(self, value: int) -> list[Span]:
        """All spans around an address; several where tensors share memory."""
        found = []
        index = bisect.bisect_right(self._begins, value) - 1
        while index >= 0 and self._begins[index] + self._longest > value:
            if value < self._begins[index] + self.spans[index].nbytes:
                found.append(self.spans[index])
            index -= 1
        return found


def explain(
    recorded: Sequence[NodeWords], again: Sequence[NodeWords], spans: Sequence[Span], ours: Callable[[int, int], bool]
) -> list[Word] | Unlike:
    """Words that moved exactly as one tensor did; or what differs otherwise.

    ``ours(old, new)``: both are addresses of the recording's own memory, which a capture may take elsewhere.
    """
    if len(recorded) != len(again):
        return Unlike(f"a second capture has {len(again)} nodes instead of {len(recorded)}")
    places = Places([one for one in spans if one.nbytes])
    places_now = Places([evolve(one, begin=one.now) for one in places.spans])
    ways = {span.now - span.begin for span in places.spans} - {0}

    def is_address(old: int, new: int) -> bool:
        """In known tensors in both captures, or beside one that moved."""
        return new - old in ways or bool(places.find(old) and places_now.find(new))

    found: list[Word] = []
    for number, (one, other) in enumerate(zip(recorded, again, strict=True)):
        if one.closed is not None:
            return Unlike(one.closed, number)
        if (one.kind, one.same, len(one.words)) != (other.kind, other.same, len(other.words)):
            return Unlike("a second capture launches something else there", number)
        if one.words == other.words:
            continue
        for index, (old, new) in enumerate(zip(one.words, other.words, strict=True)):
            if old == new:
                continue
            moved = [span for span in places.find(old) if new - old == span.now - span.begin]
            if len(moved) == 1 or (moved and all(span.tied for span in moved)):
                found += [Word(number, index, span.path, old - span.begin) for span in moved]
            elif moved:
                return Unlike(f"{moved[0].path} and {moved[1].path} share memory", number)
            elif not ours(old, new) and (one.filled or is_address(old, new)):
                return Unlike(f"a parameter changed for no known reason (word {index}: {old:#x}, {new:#x})", number)
    return found
