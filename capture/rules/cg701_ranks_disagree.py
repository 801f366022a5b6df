"""Another rank runs this eagerly, so all do.

## What it does
Reports that a process which shares collectives with this one cannot record the call, or did not answer in time when
both were making a plan or a recording of it.

## Why it matters
Ranks wait for each other in every collective, so that all are as slow as the slowest one: a recording in one rank alone
gains nothing, and holds memory. The numbers are right either way, as both issue the same collectives.

## Example
```python
@capture
def step(x):
    y = x * 2
    if rank == 0:
        print(y.sum().item())
    dist.all_reduce(y)
    return y
```

## Instead
```python
@capture
def step(x):
    y = x * 2
    dist.all_reduce(y)
    return y

y = step(x)
if rank == 0:
    print(y.sum().item())
```

## Fix safety
The other rank's own finding names what to change and at what cost.

## Known gaps
Ranks agree when a plan and when a recording is made. One that goes eager later does so alone. Bodies whose collectives
all go to or from one rank do not agree, as nothing tells a rank that the others have come.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG701", "ranks-disagree", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    dissent = case.facts.dissent
    if dissent is not None:
        who = f"rank {dissent.rank}" if dissent.rank >= 0 else "another rank"
        yield RULE.finding(
            what=f"{who} does not record this: {dissent.reason}",
            why="ranks wait for each other in every collective, so that a recording in one of them gains nothing",
            fix=(
                f"do what the warnings of {who} say, then capture.reset(...) in all ranks  (it is watched once more)",
                "capture what lies between the collectives apart, which each rank decides alone  (more launches)",
            ),
            where=case.facts.defined_at,
        )
