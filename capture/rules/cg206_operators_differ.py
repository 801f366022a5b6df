"""Two runs under one key ran different operators.

## What it does
Compares the operators of two watched runs, in order, and reports the first place where they part.

## Why it matters
A recording holds one sequence. A replay would run it, whichever way eager code would have gone.

## Example
```python
@capture
def step(x):
    if time.monotonic() % 2 < 1:
        return x * 2
    return x + 1
```

## Instead
```python
@capture
def step(x, double):
    if double:
        return x * 2
    return x + 1
```

## Fix safety
A plain Python argument is part of the key, so that each of its values gets a recording of its own.

## Known gaps
A branch that goes the same way in all watched runs and another way later is not noticed, unless the body's own code
names what it depends on.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG206", "operators-differ", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    change = case.facts.sequence_change
    if change is not None:
        first, second = op_text(change.first or "none"), op_text(change.second or "none")
        yield RULE.finding(
            what=f"operator {change.index} was {first} in one run and {second} in the next",
            why="a recording holds one sequence of operators, and the body took another way the second time",
            fix=(
                "pass what decides the way as a Python argument  (one recording a value)",
                "name it in guards=  (one recording a value)",
                "choose on the device: torch.where(condition, a, b)  (computes both sides)",
            ),
            where=change.where,
        )
