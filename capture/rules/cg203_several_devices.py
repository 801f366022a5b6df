"""The body works on more than one accelerator.

## What it does
Reports bodies whose tensors are on two or more devices other than the CPU.

## Why it matters
A recording belongs to one device, one stream and one pool of memory there.

## Example
```python
@capture
def step(x, first, second):
    return second(first(x).to("cuda:1"))
```

## Instead
```python
first = capture(first)
second = capture(second)

def step(x):
    return second(first(x).to("cuda:1"))
```

## Fix safety
Capturing each device's part on its own gives the same values.

## Known gaps
A peer access that no tensor shows is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import accelerators, rule
from capture.rules.case import Case


@rule("CG203", "several-devices", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    devices = accelerators(case.facts.devices)
    if len(devices) > 1:
        yield RULE.finding(
            what=f"the body works on {len(devices)} devices: {', '.join(devices)}",
            why="a recording belongs to one device, and its memory comes from a pool there",
            fix=("capture the part of each device on its own  (one replay a device)",),
            where=case.facts.defined_at,
        )
