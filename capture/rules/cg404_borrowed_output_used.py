"""A borrowed output is used after the step it belongs to.

## What it does
Raises when an output handed out with `outputs="borrow"` is used after its step has ended.

## Why it matters
The memory of a borrowed output is given to the next step's recordings, so it may hold other values by then.

## Example
```python
@capture(outputs="borrow")
def decode(ids): ...

kept = []
for ids in stream:
    mark_step_begin()
    kept.append(decode(ids))
print(kept[0])
```

## Instead
```python
for ids in stream:
    mark_step_begin()
    kept.append(decode(ids).clone())
```

## Fix safety
A clone within the step always has the right values. `outputs="preserve"` copies only what is still held.

## Known gaps
A view made of a borrowed output does not raise; it keeps the right values instead, at the cost of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG404", "borrowed-output-used", severity=Severity.ERROR)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    use = case.facts.borrowed_use
    if use is not None:
        yield RULE.finding(
            what=f"an output of {use.function} was used after its step ended",
            why="its memory belongs to the next step's recordings, which may have written other values there",
            fix=(
                "copy it within its step: out.clone()  (one copy)",
                'decorate with outputs="preserve"  (a copy only while it is still held)',
                'decorate with outputs="clone"  (a copy on every call)',
            ),
            where=use.where,
        )
