"""The host reads a tensor's values.

## What it does
Finds calls that bring a tensor's values to Python while the body runs: `.item()`, `if tensor:`, `.tolist()`,
`.numpy()`, printing, also in functions of torch, such as the step of an optimizer that counts on the host.

## Why it matters
A recorded graph runs without the host. Where what was read can be compared, the graph ends there: each replay reads the
value again, waits for it, and goes on with the segment that was recorded after this value; a value that is new is
recorded as one more branch. That is a note. On the CPU engine lists, arrays and texts are compared as well. The
function runs eagerly where a read cannot be compared, such as an array or a text of a tensor on a device, memory that
is handed out, or an array on memory that is written, and where what is read is another value in call after call.

## Example
```python
@capture
def step(x):
    if x.sum() > 0:
        return x
    return -x
```

## Instead
```python
@capture
def step(x):
    return torch.where(x.sum() > 0, x, -x)
```

## Fix safety
`torch.where` computes both sides: an error or a NaN on the side not taken does not reach the result, but reaches its
gradient.

## Known gaps
A read by an extension through a raw pointer is not seen. A number that the body only returns, keeps
(`losses.append(loss.item())`) or adds to a number is read anew in each replay and not compared. A number that goes into
a text, such as a line of a log, counts like one that decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._host_reads import describe
from capture.rules._rule import accelerators, rule
from capture.rules.case import Case


@rule("CG201", "host-sync", severity=Severity.EAGER, revision=2)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    on_accelerator = bool(accelerators(case.facts.devices))
    unsteady = case.facts.unsteady_reads
    for sync in case.facts.host_syncs:
        if sync.data_dependent_shape:
            continue
        read = describe(sync, on_accelerator=on_accelerator)
        why = "a replay runs on the device, without Python: the value of the recorded call would stay for ever"
        if sync.is_compared:
            why = (
                unsteady
                or "a segment of the recording ends here: each replay waits for this value, which picks the next"
            )
        severity = Severity.NOTE if sync.is_compared and unsteady is None else Severity.EAGER
        yield RULE.finding(
            what=f"{read.who} reads a tensor's value on the host", why=why, fix=read.fix, where=sync.where,
            severity=severity,
        )  # fmt: skip
