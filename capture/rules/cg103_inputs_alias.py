"""Inputs share memory with each other.

## What it does
Finds groups of inputs that overlap in memory. Arguments of one group are copied in together, and back if one of them is
mutated. An argument that overlaps a static or implicit tensor, where either is mutated, cannot be recorded.

## Why it matters
In eager code a write through one name shows through the other. A copied argument lives in a buffer of its own, so a
write to the static tensor beside it would no longer show.

## Example
```python
@capture(static=["table"])
def step(row, table):
    table.add_(1)
    return row * 2

step(table[0], table)
```

## Instead
```python
@capture(static=["table"])
def step(index, table):
    table.add_(1)
    return table.index_select(0, index) * 2

step(torch.zeros(1, dtype=torch.long), table)
```

## Fix safety
Passing a clone is safe unless the body relies on seeing its own writes through the other name.

## Known gaps
Two tensors of one storage count as overlapping even where their elements interleave without touching.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import PlaceholderInfo
from capture.core.findings import Decision, Finding, Policy, Severity
from capture.rules._rule import is_bound, names_text, rule
from capture.rules.case import Case


@rule("CG103", "inputs-alias", severity=Severity.EAGER, revision=2)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    groups: dict[int, list[PlaceholderInfo]] = {}
    for info in case.facts.placeholders:
        if info.alias_group is not None:
            groups.setdefault(info.alias_group, []).append(info)
    for group in groups.values():
        fixed = [info for info in group if info.static or info.kind == "implicit"]
        copied = [info for info in group if info.kind == "argument" and not info.static and not is_bound(case, info)]
        if not copied or len(group) < 2:
            continue
        writer = next((info for info in group if info.mutation), None)
        policy = Policy.COPY_BACK if writer else Policy.COPY
        if fixed:
            yield _beside_fixed(copied[0], fixed[0], writer)
        elif writer:
            yield _together(copied, writer)
        for info in copied:
            others = names_text(placeholder.path for placeholder in group if placeholder is not info)
            yield RULE.decision(info.path, policy, f"shares memory with {others}")


def _beside_fixed(copied: PlaceholderInfo, fixed: PlaceholderInfo, writer: PlaceholderInfo | None) -> Finding:
    where = writer.mutation.where if writer and writer.mutation else copied.first_use
    what = f"argument {copied.path!r} shares memory with {fixed.path!r}"
    if writer is None:
        return RULE.finding(
            what=what,
            why=f"{copied.path!r} is copied in while {fixed.path!r} is read in place; nobody writes, so both agree",
            fix=(f"add {copied.path!r} to static=  (saves the copy; promises a fixed address)",),
            where=where,
            path=copied.path,
            severity=Severity.NOTE,
        )
    return RULE.finding(
        what=f"{what}, and {writer.path!r} is written in place",
        why=f"{copied.path!r} would be a copy, so the write would not show through the other name",
        fix=(
            f"add {copied.path!r} to static=  (no cost; promises a fixed address)",
            f"pass {copied.path}.clone() if the write need not show  (one copy a call)",
        ),
        where=where,
        path=copied.path,
    )


def _together(copied: list[PlaceholderInfo], writer: PlaceholderInfo) -> Finding:
    return RULE.finding(
        what=f"arguments {names_text(info.path for info in copied)} share memory, and {writer.path!r} is written",
        why="a write through one name shows through the others, so all of them are copied in and back together",
        fix=("add all of them to static=  (no cost; promises fixed addresses)",),
        where=writer.mutation.where if writer.mutation else None,
        path=copied[0].path,
        severity=Severity.COPY,
    )
