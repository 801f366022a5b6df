"""The body runs one operator or none.

## What it does
Reports bodies in which a replay would replace at most one operator.

## Why it matters
A replay saves the host time between operators. With one operator there is none, and the copies of the arguments come
on top.

## Example
```python
@capture
def double(x):
    return x * 2
```

## Instead
```python
@capture
def step(x):
    return torch.relu(x * 2 + 1)
```

## Fix safety
Removing the decorator is safe: eager values are the same.

## Known gaps
Operators are counted, not timed: a single operator that launches many kernels may pay.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG902", "recording-does-not-pay", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    count = case.facts.num_ops
    if count <= 1 and case.facts.runs:
        yield RULE.finding(
            what="the body runs one operator" if count else "the body runs no operator",
            why="a replay saves the host time between operators, and here there is none to save",
            fix=("capture a function further out  (no cost)", "remove the decorator  (no cost)"),
            where=case.facts.defined_at,
        )
