"""A verified replay gave other bits than the body.

## What it does
Reports the first output or written tensor in which a replay, under `verify=`, differed from the body on the same
inputs, state and draws.

## Why it matters
Either the body depends on something that a recording cannot see, or its operators are not deterministic. The call
returned the body's own result either way.

## Example
```python
TABLE = load()

def helper(x):
    return x * TABLE["scale"]

@capture(verify="first")
def f(x):
    return helper(x)
```

## Instead
```python
@capture(verify="first", guards=[lambda: TABLE["scale"]])
def f(x):
    return helper(x)
```

## Fix safety
A guard costs its own run on every call. A recording that differed is dropped and never used again.

## Known gaps
A body that differs from itself only sometimes may be reported as a difference of the replay.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG903", "replay-differs", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    verification = case.facts.verification
    if verification is None:
        return
    if verification.deterministic:
        yield RULE.finding(
            what=f"{verification.path!r} of a replay differs from the body's",
            why="the body reads something that the key does not see, or this library is wrong",
            fix=(
                "name what it reads in guards=[...]  (one call of each guard a call)",
                "report it if there is nothing of the kind  (the call stays eager until then)",
            ),
            path=verification.path,
        )
    else:
        yield RULE.finding(
            what=f"{verification.path!r} differs from run to run in eager, too",
            why="an operator of the body is not deterministic, so bits cannot be compared",
            fix=("use torch.use_deterministic_algorithms(True) while verifying  (slower kernels)",),
            path=verification.path,
            severity=Severity.NOTE,
        )
