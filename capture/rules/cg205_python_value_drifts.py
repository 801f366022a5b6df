"""A Python value differs between two runs that should be equal.

## What it does
Compares the plain results and the numbers given to operators of two watched runs under one key.

## Why it matters
A recording keeps the number it was recorded with. Every replay would use it, where eager code uses a new one.

## Example
```python
scale = iter(range(1000))

@capture
def step(x):
    return x * next(scale)
```

## Instead
```python
@capture
def step(x, scale):
    return x * scale
```

## Fix safety
As a tensor argument the value costs one small copy a call; as a number it costs one recording for each value.

## Known gaps
With `warmup=1` there is one watched run only and the recording run is the one it is compared with; a value that
changes later is not noticed unless the body's own code names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from capture.core.facts import Drift
from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG205", "python-value-drifts", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for drift in case.facts.drifts:
        yield RULE.finding(
            what=_what(drift),
            why="a recording keeps the number it was recorded with, and every replay would use that one",
            fix=(
                "pass the value as a tensor argument  (one small copy a call)",
                "pass it as a Python argument  (one recording a value)",
                "name what it depends on in guards=  (one recording a value)",
            ),
            where=drift.where,
            path=drift.path,
        )


def _what(drift: Drift) -> str:
    place, values = _place(drift.path), (drift.first, drift.second)
    if place != drift.path:  # of an operator; its parameters have numbers, which the user's line does not show
        values = (re.sub(r"^\w+=", "", drift.first), re.sub(r"^\w+=", "", drift.second))
    return f"{place} was {values[0]} in one run and {values[1]} in the next"


def _place(path: str) -> str:
    """An output's path, or an argument of an operator."""
    op = path.removesuffix(" argument")
    return path if op == path else f"an argument of {op_text(op)}"
