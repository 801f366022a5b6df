"""Which parameters of a recorded graph hold the address of which tensor. Pure: numbers in, numbers out.

In: the parameters of all nodes of two captures of one body, as 8-byte words, and where each tensor was in the first and
is in the second. Out: for each word that is an address, its tensor and the offset in it; or the reason why the graph
cannot be patched. What is given as an address is one: a word that is wrongly taken for one would make a kernel read and
write memory at random after the next move.

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

from attrs import evolve, field

from capture.core.data import frozen

_NEAR = 1 << 32  # bytes: as far as a kernel's 32-bit offsets reach
NodeKind = Literal["kernel", "memcpy", "memset", "other"]


@frozen(eq=False)
class NodeParameters:
    """The parameters of one node."""

    kind: NodeKind
    same: tuple[object, ...]
    """What is equal in every capture of one body: the function, the grid, sizes."""
    words: tuple[int, ...]
    """The other parameters, read 8 bytes at a time."""
    filled: bool = False
    """No gaps: the launching code wrote every byte, so that any word that differs counts."""
    closed: str | None = None
    """Why it cannot be told what this node reads; None where it can."""


@frozen
class TensorRange:
    """The memory of a tensor: where it was when the graph was recorded, and where it is now."""

    path: str
    begin: int
    nbytes: int
    now: int
    tied: bool = False
    """It moves together with all others that are tied and share memory with it."""

    def is_near(self, address: int) -> bool:
        """Whether launching code may have worked out the address from that of the tensor. Other memory that happens to
        move as far, such as the stack in an unfilled gap, lies much farther away."""
        return abs(address - self.begin) <= max(_NEAR, 2 * self.nbytes)


@frozen
class AddressWord:
    """The word of a node that holds ``offset`` bytes past the begin of the tensor at ``path``."""

    node: int
    index: int
    path: str
    offset: int


@frozen
class CaptureDifference:
    """Why the captures differ by more than addresses. ``node``: where, if it is one place."""

    reason: str
    node: int | None = None


@frozen(eq=False)
class RangeIndex:
    """Finds the ranges that a value lies in."""

    ranges: Sequence[TensorRange]
    _begins: list[int] = field(init=False)
    _longest: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        ranges = sorted(self.ranges, key=lambda one: one.begin)
        object.__setattr__(self, "ranges", ranges)
        object.__setattr__(self, "_begins", [range_.begin for range_ in ranges])
        object.__setattr__(self, "_longest", max((range_.nbytes for range_ in ranges), default=0))

    def find(self, value: int) -> list[TensorRange]:
        """All ranges around an address; several where tensors share memory."""
        ranges = []
        index = bisect.bisect_right(self._begins, value) - 1
        while index >= 0 and self._begins[index] + self._longest > value:
            if value < self._begins[index] + self.ranges[index].nbytes:
                ranges.append(self.ranges[index])
            index -= 1
        return ranges


def infer_addresses(
    recorded: Sequence[NodeParameters],
    again: Sequence[NodeParameters],
    ranges: Sequence[TensorRange],
    is_own_memory: Callable[[int, int], bool],
) -> list[AddressWord] | CaptureDifference:
    """Words that moved exactly as one tensor did; or what differs otherwise.

    ``is_own_memory(old, new)``: both are addresses of the recording's own memory, which a capture may take elsewhere.
    """
    if len(recorded) != len(again):
        return CaptureDifference(f"a second capture has {len(again)} nodes instead of {len(recorded)}")
    before = RangeIndex([range_ for range_ in ranges if range_.nbytes])
    now = RangeIndex([evolve(range_, begin=range_.now) for range_ in before.ranges])
    shifted: dict[int, list[TensorRange]] = {}
    for range_ in before.ranges:
        shifted.setdefault(range_.now - range_.begin, []).append(range_)

    def is_address(old: int, new: int) -> bool:
        """Whether the word is an address: in known tensors in both captures, or beside one that moved."""
        beside = any(one.is_near(old) for one in shifted.get(new - old, ()))
        return beside or bool(before.find(old) and now.find(new))

    addresses: list[AddressWord] = []
    for number, (node, twin) in enumerate(zip(recorded, again, strict=True)):
        if node.closed is not None:
            return CaptureDifference(node.closed, number)
        if (node.kind, node.same, len(node.words)) != (twin.kind, twin.same, len(twin.words)):
            return CaptureDifference("a second capture launches something else there", number)
        if node.words == twin.words:
            continue
        for index, (old, new) in enumerate(zip(node.words, twin.words, strict=True)):
            if old == new:
                continue
            moved = [range_ for range_ in before.find(old) if new - old == range_.now - range_.begin]
            if len(moved) == 1 or (moved and all(range_.tied for range_ in moved)):
                addresses += [AddressWord(number, index, range_.path, old - range_.begin) for range_ in moved]
            elif moved:
                return CaptureDifference(f"{moved[0].path} and {moved[1].path} share memory", number)
            elif not is_own_memory(old, new) and (node.filled or is_address(old, new)):
                return CaptureDifference(
                    f"a parameter changed for no known reason (word {index}: {old:#x}, {new:#x})", number
                )
    return addresses
