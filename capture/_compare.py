"""Compare: what differed between two runs under one key, from their facts alone."""

from __future__ import annotations

from collections.abc import Sequence

from capture._facts import Drift, Facts, SequenceChange, Where


def compare(
    first: Facts, second: Facts, lines: Sequence[Where | None] = ()
) -> tuple[tuple[Drift, ...], SequenceChange | None]:
    """Differences between two runs under one key that a recording would freeze. ``lines``: of the second run."""
    for index, (one, other) in enumerate(zip(first.sequence, second.sequence, strict=False)):
        if one != other:
            where = lines[index] if index < len(lines) else None
            return (), SequenceChange(index=index, first=one, second=other, where=where)
    if len(first.sequence) != len(second.sequence):
        index = min(len(first.sequence), len(second.sequence))
        longer = first.sequence if len(first.sequence) > index else second.sequence
        names = (longer[index], "(end)") if longer is first.sequence else ("(end)", longer[index])
        where = lines[index] if index < len(lines) else None
        return (), SequenceChange(index=index, first=names[0], second=names[1], where=where)
    drifts = []
    for index, (ours, theirs) in enumerate(zip(first.scalars, second.scalars, strict=True)):
        for a, b in zip(ours, theirs, strict=False):
            if a != b:
                where = lines[index] if index < len(lines) else None
                drifts.append(Drift(path=f"{second.sequence[index]} argument", first=a, second=b, where=where))
    for mine, yours in zip(first.outputs, second.outputs, strict=False):
        if mine.value != yours.value:
            drifts.append(Drift(path=mine.path, first=str(mine.value), second=str(yours.value)))
    return tuple(drifts), None
