"""The size of a result depends on a tensor's values.

## What it does
Finds operators such as `nonzero`, boolean indexing and `unique`, whose result has as many elements as the values say.

## Why it matters
A recording has fixed sizes and addresses. The host has to read the count before anything after it can run. So a segment
of the recording ends there: each replay runs the operator anew, and goes on with what was recorded after these sizes.
That is a note; where the sizes are others in call after call, the function runs eagerly.

## Example
```python
@capture
def step(x):
    return x[x > 0].sum()
```

## Instead
```python
@capture
def step(x):
    return torch.where(x > 0, x, 0).sum()
```

## Fix safety
A mask keeps the full size: reductions with a count, such as `mean`, have to divide by the mask's sum.

## Known gaps
An operator of another library that reads the count itself shows up as a host read.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG601", "data-dependent-shape", severity=Severity.EAGER, revision=2)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    unsteady = case.facts.unsteady_reads
    for sync in case.facts.host_syncs:
        if sync.data_dependent_shape:
            why = "a recording has fixed sizes, and the host would have to read the count on every replay"
            if sync.is_compared:
                why = (
                    unsteady
                    or "a segment of the recording ends here: each replay waits for the sizes, which pick the next"
                )
            yield RULE.finding(
                what=f"the size of the result of {op_text(sync.op)} depends on a tensor's values",
                why=why,
                fix=(
                    "keep the full size and mask: torch.where(mask, x, 0)  (computes all elements)",
                    "take a fixed number: torch.topk(x, k)  (one sort)",
                    "move it after the captured function  (no cost)",
                ),
                where=sync.where,
                severity=Severity.NOTE if sync.is_compared and unsteady is None else Severity.EAGER,
            )
