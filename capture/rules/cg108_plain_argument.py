"""An argument is copied in, or read in place if it is static.

## What it does
Decides the policy of every argument that no other rule raises: static ones stay where they are, all others are copied
into the recording's own buffer.

## Why it matters
It is the default. The caller may pass a tensor at any address, reuse it and free it, and a replay reads its own copy.

## Example
```python
@capture
def step(x, table):
    return x + table
```

## Instead
```python
@capture(static=["table"])
def step(x, table):
    return x + table
```

## Fix safety
`static=` promises that the same tensor comes back every call. A broken promise is noticed and bound again.

## Known gaps
An argument the body does not read is copied as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture._findings import Case, Decision, Finding, Policy, Severity
from capture.rules._rule import rule


@rule("CG108", "plain-argument", severity=Severity.NOTE)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for info in case.facts.placeholders:
        if info.kind != "argument":
            continue
        if info.static:
            yield RULE.decision(info.path, Policy.STATIC, "named in static=")
        else:
            yield RULE.decision(info.path, Policy.COPY, "arguments are copied in by default")
