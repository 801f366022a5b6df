"""A recording run met something the engine cannot hold.

## What it does
Reports the reason for which a run that was to become a recording did not.

## Why it matters
The watched run before it showed nothing that forbids a recording, yet the engine met an operator, a device or a tensor
it cannot replay. The call's result is eager's; later calls run eagerly.

## Example
```python
@capture
def f(x):
    y = (x * 1j).conj()
    return torch.view_as_real(y.resolve_conj()) + y.imag
```

## Instead
```python
@capture
def f(x):
    y = (x * 1j).conj().resolve_conj()
    return torch.view_as_real(y) + y.imag
```

## Fix safety
Moving the named operator out of the captured function costs nothing but its launch.

## Known gaps
Only the first reason of a run is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG904", "recording-refused", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    if case.facts.refused is not None:
        yield RULE.finding(
            what=f"the run could not be recorded: {case.facts.refused}",
            why="the engine has no way to run this again in the same memory",
            fix=("move what is named out of the captured function  (it is launched eagerly then)",),
        )
