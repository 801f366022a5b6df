"""No backend can record on this device.

## What it does
Reports the device type of the body's tensors when there is no backend for it.

## Why it matters
Without a backend there is nobody to record and replay, so the function runs as it is.

## Example
```python
@capture
def step(x):
    return x * 2

step(torch.ones(4, device="meta"))
```

## Instead
```python
step(torch.ones(4, device="cuda"))
```

## Fix safety
Running eagerly is always right; only the speed of a replay is missing.

## Known gaps
The device type is checked, not the abilities of the installed driver.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG802", "no-backend", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    device = case.facts.backend_missing
    if device is not None:
        yield RULE.finding(
            what=f"there is no backend for device type {device!r}",
            why="a backend records and replays, and the built-in ones serve cuda and cpu",
            fix=("move the tensors to cuda or cpu  (no cost at replay)",),
            where=case.facts.defined_at,
        )
