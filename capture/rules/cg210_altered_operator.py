"""An operator that torch computes in another way where a recording is watched by a dispatch mode.

## What it does
Notes operators whose results may differ from eager's in the last bits: singular values and eigenvalues without vectors,
the gradients of `prod` and `cumprod`, and `(b, n, m) @ (1, m, p)`.

## Why it matters
With torch before 2.13, in a body that calls compiled code, and where torch fills memory without an operator, a dispatch
mode shows the operators of a body. Torch asks whether one is on, and then computes some values in another way. Both are
right to rounding; every other operator has eager's bits.

## Example
```python
@capture
def log_volume(x):
    return torch.linalg.svdvals(x).log().sum()
```

## Instead
```python
@capture.island
def singular_values(x):
    return torch.linalg.svdvals(x)

@capture
def log_volume(x):
    return singular_values(x).log().sum()
```

## Fix safety
With torch 2.13 or newer no mode is needed, and no result differs. An island runs as in eager code, at the cost of one
launch more; it has no gradients.

## Known gaps
What torch called is told by its order: a body that calls the same operators in the same order itself is noted, too, as
one that calls `torch.linalg.svd` or `torch.linalg.eigh`. Its bits are eager's.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG210", "altered-operator", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for operator in case.facts.altered:
        yield RULE.finding(
            what=f"the last bits of {operator.what} may differ from eager's",
            why="a dispatch mode shows the operators of this body, and torch computes this in another way under one",
            fix=(
                "use torch 2.13 or newer, if this one is older  (no cost)",
                "compute it in a function that is marked @capture.island  (one launch more, no gradients)",
            ),
            where=operator.where,
        )
