"""Recorded graphs cannot be bound to other addresses in this process.

## What it does
Notes, when a tensor that a recording reads in place moves first, that parameters of recorded graphs cannot be changed.

## Why it matters
A recording follows a tensor that moves by a change of its graph's parameters, through the package ``cuda-bindings``.
Without it the function is recorded again at the new address, which costs some hundred times as much, and a tensor that
goes on moving is copied in every call. Values are the same.

## Example
```python
for weights in (first, second):
    model.linear.weight = weights
    step(x)
```

## Instead
```python
for weights in (first, second):
    model.linear.weight.data.copy_(weights)
    step(x)
```

## Fix safety
Installing ``cuda-bindings`` changes no value. Writing in place changes the tensor for everybody who holds it.

## Known gaps
None.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG804", "graphs-not-patched", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    if case.facts.unpatchable is not None:
        yield RULE.finding(
            what="recorded graphs cannot be bound to other addresses",
            why=f"{case.facts.unpatchable}: a tensor that moves is recorded again, and copied in every call once it"
            " moves often",
            fix=("install cuda-bindings of your CUDA version  (a rebind then takes microseconds)",),
        )
