"""The function has as many recordings as it may have.

## What it does
Reports the call that would need one recording more than `max_recordings`, and what made it differ from those before.

## Why it matters
Each recording costs memory and a slow first call. A key that changes on every call would record for ever and replay
nothing.

## Example
```python
@capture(max_recordings=5)
def step(x, index):
    return x + index

for index in range(1000):
    step(x, index)
```

## Instead
```python
@capture
def step(x, index):
    return x + index

for index in range(1000):
    step(x, torch.tensor(index))
```

## Fix safety
Padding changes the shapes the body sees; operators that look at the whole tensor need a mask.

## Known gaps
The difference is taken to the recording that comes nearest; the others may differ in more.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import LimitReached
from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import NUMBER, SETTING, SIZES, rule, tensor_setting
from capture.rules.case import Case


@rule("CG901", "recording-limit", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    limit = case.facts.limit
    if limit is None:
        return
    most = case.annotation.max_recordings
    changed = (
        f"{limit.path!r} differs: {limit.before} -> {limit.after}"
        if limit.path
        else f"this call differs: {limit.difference}"
    )
    fix = [*_fixes(limit), f"raise max_recordings above {most}  (memory and a slow first call each)"]
    yield RULE.finding(
        what=f"{limit.num_recordings} recordings exist (max_recordings={most}), and {changed}",
        why=f"every difference needs a recording of its own, and this call asks for one more: {limit.difference}",
        fix=fix,
        where=limit.where,
        path=limit.path,
        severity=Severity.ERROR if case.annotation.fallback == "error" else Severity.EAGER,
    )


def _fixes(limit: LimitReached) -> list[str]:
    """What helps against the difference that is named."""
    setting = SETTING.fullmatch(limit.path or "")
    if setting is not None:
        return [tensor_setting(*setting.groups())]
    if SIZES.fullmatch(limit.before) and SIZES.fullmatch(limit.after):
        return ["pad the dimension that varies to a few sizes, with buckets=  (computes the padding)"]
    if NUMBER.fullmatch(limit.before) and NUMBER.fullmatch(limit.after):
        return [f"pass {limit.path!r} as a tensor: torch.tensor(...)  (one small copy a call)"]
    if limit.path:
        return [f"keep {limit.path!r} in one tensor and name it in static=  (no cost; promises a fixed address)"]
    return []
