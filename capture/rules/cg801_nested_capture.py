"""A captured function is called inside another one.

## What it does
Reports captured functions that ran as part of the body.

## Why it matters
There is one recording, the outer one. Options of the inner function, such as `static=`, do not apply here.

## Example
```python
@capture(static=["table"])
def inner(x, table):
    return x + table

@capture
def outer(x, table):
    return inner(x, table) * 2
```

## Instead
```python
def inner(x, table):
    return x + table

@capture(static=["table"])
def outer(x, table):
    return inner(x, table) * 2
```

## Fix safety
Nothing needs fixing: the values are the same either way.

## Known gaps
Only functions that were called in the watched run are named.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG801", "nested-capture", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for inlined in case.facts.inlined:
        yield RULE.finding(
            what=f"captured function {inlined.function} runs as part of this one",
            why="a recording cannot hold another, so the outer one holds all its operators and its options apply",
            fix=("repeat its static= on the outer function if it had one  (no cost)",),
            where=inlined.where,
            path=inlined.function,
        )
