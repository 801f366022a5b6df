"""Recordings cannot share memory under this allocator.

## What it does
Notes that every recording has a memory pool of its own.

## Why it matters
All recordings of a thread share one pool where the allocator can be told which of its blocks are in use: a path of
recordings then takes the memory of its largest part. Under ``cudaMallocAsync``, a pluggable allocator or a torch
without these calls it cannot, and the recordings' memory adds up. Values are the same.

## Example
```python
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"

@capture
def step(x):
    return x * 2
```

## Instead
```python
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:native"

@capture
def step(x):
    return x * 2
```

## Fix safety
The native allocator gives the same values; how much memory the rest of the program keeps may differ.

## Known gaps
None.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG803", "separate-pools", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    if case.facts.separate_pools is not None:
        yield RULE.finding(
            what=f"every recording has a memory pool of its own under the allocator {case.facts.separate_pools!r}",
            why="its blocks cannot be taken again as they were, so recordings cannot share memory; values are the same",
            fix=("use PyTorch's native allocator  (recordings share one pool)",),
        )
