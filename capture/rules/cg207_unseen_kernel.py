"""A kernel is launched that no operator tells of.

## What it does
Reports where a kernel entered the recording without an operator: Triton, CuPy, numba, a C++ extension, or code that
``torch.compile`` made.

## Why it matters
The kernel is recorded and replays like any other. Which memory it reads and writes cannot be seen, so every copied
argument is copied back after a replay, and no tensor that the body can reach may move without a new recording. A
tensor that only the kernel's own launcher knows is not followed.

## Example
```python
@capture
def step(x):
    y = torch.empty_like(x)
    scale_kernel[(1,)](x, y, x.numel())
    return y
```

## Instead
```python
@torch.library.custom_op("mine::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    scale_kernel[(1,)](x, y, x.numel())
    return y

@capture
def step(x):
    return scale(x)
```

## Fix safety
A custom operator says what it reads and writes; the values are the same.

## Known gaps
Found by counting the nodes of the graph, which the driver library tells; without it only by memory that no operator
made.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG207", "unseen-kernel", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for where in case.facts.unseen:
        yield RULE.finding(
            what="a kernel is launched that no operator tells of",
            why="which memory it uses cannot be seen: arguments are copied back, and no reachable tensor may move",
            fix=("make it a custom operator with torch.library.custom_op  (no cost)",),
            where=where,
        )
