"""A recording would take more memory than the limit allows.

## What it does
Reports a call that is not recorded because of ``memory_limit``.

## Why it matters
A recording keeps memory for its results and for what lies between them. A watched run tells how much a run has at
once; where that, beside what recordings take already, exceeds the limit, the call runs eagerly, in memory that is given
back. So one large input does not cost all others their recordings.

## Example
```python
with capture.config.patch(memory_limit=1 << 30):
    for batch in batches:
        step(batch)  # one of them is 100 times as large as the others
```

## Instead
```python
with capture.config.patch(memory_limit=0.5):  # of the device's memory
    for batch in batches:
        step(batch)
```

## Fix safety
A higher limit leaves less memory to eager code and to other processes.

## Known gaps
Memory inside of an operator is not counted. A recording that turns out to be larger than foreseen is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.core.sizes import bytes_text
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG907", "memory-limit", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    forecast = case.facts.too_large
    if forecast is None:
        return
    needed, limit = bytes_text(forecast.nbytes), bytes_text(forecast.limit)
    yield RULE.finding(
        what=f"recordings on {forecast.device} would take {needed}, and may take {limit}",
        why="a recording keeps the memory of its results and of what lies between them",
        fix=(
            "raise memory_limit, in bytes or as a share of the device  (less memory for all else)",
            "split the input into smaller ones  (a call each)",
        ),
        where=forecast.where,
        severity=Severity.ERROR if case.annotation.fallback == "error" else Severity.EAGER,
    )
