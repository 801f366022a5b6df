"""The function is a generator function or a coroutine function.

## What it does
Reports `@capture` on a function with `yield`, or on an `async def`. The decorator gives the function back as it is, so
that it works as without the decorator; calls are not counted.

## Why it matters
A call of such a function runs nothing yet: its body runs in parts, between which anything may happen. A replay has no
parts, and so nothing of it is recorded.

## Example
```python
@capture
def tokens(ids):
    while True:
        ids = model(ids).argmax(-1)
        yield ids
```

## Instead
```python
@capture
def step(ids):
    return model(ids).argmax(-1)

def tokens(ids):
    while True:
        ids = step(ids)
        yield ids
```

## Fix safety
The captured function runs as a whole: what happened between two of its parts happens before or after it.

## Known gaps
A plain function that only returns a generator or a coroutine is captured, and runs eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG209", "suspended-function", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    kind = case.facts.suspends
    if kind is not None:
        between = "awaits" if "coroutine" in kind else "yields"
        yield RULE.finding(
            what=f"it is a function whose calls give {kind}",
            why="its body runs in parts, between which anything may happen, and a replay has no parts",
            fix=(f"capture the function that does the work between two {between}  (no cost)",),
            where=case.facts.defined_at,
        )
