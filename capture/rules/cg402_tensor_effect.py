"""The body stores something where it can be found again.

## What it does
Reports attributes, items and globals that hold another tensor or plain value after the run than before, numbers that
the body only adds to, and lists, dicts and sets whose members it changed.

## Why it matters
A replay does not run the assignment. It is done again after each replay, so that the name holds the new tensor as in
eager code, and a counter counts. A plain value follows from what the body read, which is compared before each replay.

## Example
```python
class Model(torch.nn.Module):
    @capture
    def forward(self, x):
        self.last = x * 2
        return self.last + 1
```

## Instead
```python
class Model(torch.nn.Module):
    @capture
    def forward(self, x):
        last = x * 2
        return last, last + 1
```

## Fix safety
Nothing needs fixing. Returning the tensor instead leaves the choice of keeping it to the caller.

## Known gaps
A property or `__setattr__` with effects of its own runs again after each replay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

_ORIGINS = re.compile(r"(?<=members) \([-\d,]*\)")
"""Which of the former members each one is: facts have it to compare runs, and it tells a reader nothing."""


@rule("CG402", "tensor-effect", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for effect in case.facts.effects:
        if effect.kind in ("tensor", "value", "count", "members"):
            verb = "is set" if effect.kind in ("tensor", "value") else "is changed"
            yield RULE.finding(
                what=f"{effect.path!r} {verb} after every replay: {effect.before} -> {_ORIGINS.sub('', effect.after)}",
                why="a replay does not run the assignment, so it is done again",
                where=effect.where,
                path=effect.path,
            )
