"""Which operators of a tape need the results of which others, as levels (``core.schedule``).

An operator comes after the last one that wrote what it reads, and after all that read or wrote what it writes. Memory
is compared as the body allocated it, not by address: that two results have the same place in the arena, one after the
other, is the arena's choice and no dependency of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from capture.core.data import define
from capture.core.schedule import Schedule

_GENERATORS = -1  # stands for the generators: operators that draw follow each other


@define
class _Last:
    """Numbers of the last operators that touched a memory; their levels decide."""

    written: int | None = None
    read: int | None = None
    """Of those on the lowest level since it was written."""


def schedule(steps: Sequence[Any], memory_of: Sequence[int], registers_of: Any) -> Schedule:
    """``memory_of``: a number for the memory of each register; ``registers_of``: those in a template of arguments."""
    levels: list[int] = []
    before: list[int | None] = []
    memories: dict[int, _Last] = {}
    barrier: int | None = None
    for number, step in enumerate(steps):
        reads = {memory_of[register] for register in registers_of((step.args, tuple(step.kwargs.values())))}
        writes = {memory_of[register] for register in (*step.writes, *(out[1] for out in step.outs if out is not None))}
        if step.order == "draws":
            writes.add(_GENERATORS)
        followed = [barrier] if step.order != "barrier" else [*range(number)]
        followed += [memories[memory].written for memory in reads | writes if memory in memories]
        followed += [memories[write].read for write in writes if write in memories]
        last = max((number for number in followed if number is not None), key=levels.__getitem__, default=None)
        before.append(last)
        levels.append(0 if last is None else levels[last] + 1)
        _note(memories, number, levels, reads - writes, writes)
        if step.order == "barrier":
            barrier = number
    widths = [0] * (max(levels, default=-1) + 1)
    for level in levels:
        widths[level] += 1
    at = max(range(len(levels)), key=levels.__getitem__, default=None)
    longest: list[str] = []
    while at is not None:
        longest.append(steps[at].name or getattr(steps[at].function, "__name__", str(steps[at].function)))
        at = before[at]
    return Schedule(widths=tuple(widths), longest=tuple(reversed(longest)))


def _note(
    memories: dict[int, _Last], number: int, levels: Sequence[int], reads: Iterable[int], writes: Iterable[int]
) -> None:
    for memory in writes:
        memories[memory] = _Last(written=number)
    for memory in reads:
        last = memories.setdefault(memory, _Last())
        if last.read is None or levels[last.read] < levels[number]:
            last.read = number
