"""A replay that communicates is not compared with eager.

## What it does
Says that `verify=` is left out for a body with collectives.

## Why it matters
To compare a replay with the body, both run for one call. The second time a collective would wait for ranks that do not
verify just this call, or take what they send for another one.

## Example
```python
@capture(verify="first")
def step(x):
    y = x * 2
    dist.all_reduce(y)
    return y
```

## Instead
```python
@capture(verify="first")
def scale(x):
    return x * 2

y = scale(x)
dist.all_reduce(y)
```

## Fix safety
The parts between collectives give the same values captured apart, at the cost of more launches.

## Known gaps
`CAPTURE_VERIFY` leaves such functions out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG703", "collective-not-verified", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    if case.facts.collectives and case.annotation.verify != "off":
        first = case.facts.collectives[0]
        yield RULE.finding(
            what=f"verify={case.annotation.verify!r} is left out, as {op_text(first.op)} needs the other ranks",
            why="a second run for the same call would wait for ranks that do not make one, or take their data",
            fix=("capture what lies between the collectives apart, with verify=  (more launches)",),
            where=first.where,
        )
