"""A tensor made by the body is kept somewhere that cannot be found.

## What it does
Finds tensors made while the body ran that are still alive after it, but are neither returned nor stored in a place
that was compared.

## Why it matters
Memory of a recording is reused by the next replay. Whoever holds the tensor would see its values change.

## Example
```python
history = CustomLog()

@capture
def step(x):
    y = x * 2
    history.add(y)
    return y
```

## Instead
```python
@capture
def step(x):
    return x * 2

history.add(step(x))
```

## Fix safety
A returned tensor keeps its values for as long as it is held.

## Known gaps
A tensor kept by C++ code alone, without a Python object, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG401", "escaped-tensor", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for escape in case.facts.escapes:
        yield RULE.finding(
            what=f"a tensor made by {op_text(escape.op)} is kept after the call, {escape.tensor}",
            why="the next replay writes to the same memory, and whoever keeps the tensor would see other values",
            fix=(
                "return the tensor and keep the result  (no cost)",
                "store it on an attribute of self  (no cost)",
            ),
            where=escape.where,
        )
