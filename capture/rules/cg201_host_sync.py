"""The host reads a tensor's values.

## What it does
Finds calls that bring values to Python while the body runs: `item()`, `bool(tensor)`, `tolist()`, `numpy()`, printing.

## Why it matters
A recorded graph runs without the host. Where what was read can be compared, the graph ends there: each replay reads the
value again, waits for it, and goes on with the segment that was recorded after this value; a value that is new is
recorded as one more branch. That is a note. The function runs eagerly where a read cannot be compared, such as an array
or a text, and where what is read is another value in call after call.

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
A read by an extension through a raw pointer is not seen. A number that is only logged counts like one that decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule, short_op
from capture.rules.case import Case

SCALAR_FIX = (
    "choose on the device: torch.where(condition, a, b)  (computes both sides)",
    "keep the value in a tensor of no dimensions  (no cost)",
    "read it before the call and pass the number  (one recording a value)",
)
PRINT_FIX = ("print after the call  (no cost)",)
EXPORT_FIX = ("return the tensor and convert it after the call  (no cost)",)
OTHER_FIX = ("move the read after the call  (no cost)",)

WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "_local_scalar_dense": ("a tensor's value is read as a Python number or bool", SCALAR_FIX),
    "item": ("a tensor's value is read as a Python number or bool", SCALAR_FIX),
    "is_nonzero": ("a tensor's value is read as a Python bool", SCALAR_FIX),
    "equal": ("two tensors are compared on the host", SCALAR_FIX),
    "tolist": ("a tensor is read as a list", EXPORT_FIX),
    "numpy": ("a tensor is read as a numpy array", EXPORT_FIX),
    "__array__": ("a tensor is read as a numpy array", EXPORT_FIX),
    "__dlpack__": ("a tensor is handed out through DLPack", EXPORT_FIX),
    "apply_": ("Python computes a tensor's elements one by one", OTHER_FIX),
    "map_": ("Python computes a tensor's elements one by one", OTHER_FIX),
    "map2_": ("Python computes a tensor's elements one by one", OTHER_FIX),
    "data_ptr": ("the address of a tensor's memory on the host is handed out", EXPORT_FIX),
    "__repr__": ("a tensor is printed", PRINT_FIX),
    "__format__": ("a tensor is formatted into a string", PRINT_FIX),
    "print": ("a tensor is printed", PRINT_FIX),
}


@rule("CG201", "host-sync", severity=Severity.EAGER, revision=2)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    unsteady = case.facts.unsteady_reads
    for sync in case.facts.host_syncs:
        if sync.data_dependent_shape:
            continue
        what, fix = WORDS.get(short_op(sync.op), (f"{sync.op} reads a tensor's values on the host", OTHER_FIX))
        why = f"a replay runs without the host: what {sync.op} returned while recording would stay for ever"
        if sync.is_compared:
            why = (
                unsteady
                or "a segment of the recording ends here: each replay waits for this value, which picks the next"
            )
        severity = Severity.NOTE if sync.is_compared and unsteady is None else Severity.EAGER
        yield RULE.finding(what=what, why=why, fix=fix, where=sync.where, severity=severity)
