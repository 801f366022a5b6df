"""A collective that the CPU engine does not record.

## What it does
Finds messages between two ranks, barriers that are measured on the host, and handles (`async_op=True`) that leave the
body before they were waited for.

## Why it matters
A recording runs the same operators again. In a message the two ranks run different ones, so that nothing tells whether
both have a recording; and a replay makes no new handle, so that the caller would wait for an old one.

## Example
```python
@capture
def exchange(x):
    work = dist.all_reduce(x, async_op=True)
    return x, work
```

## Instead
```python
@capture
def exchange(x):
    dist.all_reduce(x)
    return x
```

## Fix safety
Waiting inside gives the same values; what ran beside the collective runs after it.

## Known gaps
On accelerators the engine records what the library behind it can hold, and messages, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG702", "collective-not-recorded", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for collective in case.facts.collectives:
        if collective.obstacle is not None:
            yield RULE.finding(
                what=f"{op_text(collective.op)} {collective.obstacle}",
                why="a replay would run other work than the ranks it works with",
                fix=(
                    "wait for it inside the captured function  (no cost)",
                    "move it before or after the captured function  (splits the work in two)",
                ),
                where=collective.where,
            )
