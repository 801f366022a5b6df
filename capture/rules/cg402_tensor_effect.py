"""The body stores a tensor where it can be found again.

## What it does
Reports attributes, items and globals that hold another tensor after the run than before.

## Why it matters
A replay does not run the assignment. It is done again after each replay, so that the name holds the new tensor as in
eager code.

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

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG402", "tensor-effect", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for effect in case.facts.effects:
        if effect.kind == "tensor":
            yield RULE.finding(
                what=f"{effect.path!r} is set after every replay: {effect.before} -> {effect.after}",
                why="a replay does not run the assignment, so it is done again with the new tensor",
                where=effect.where,
                path=effect.path,
            )
