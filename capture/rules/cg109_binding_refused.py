"""A tensor moved, and its recording could not be bound to the new address.

## What it does
Reports a static argument or implicit input that moved, where the parameters of the recorded graph could not be changed
to follow it: why, and the device function in the way where there is one.

## Why it matters
A recording follows a tensor that moves by a change of the parameters that hold its address, which takes microseconds.
Where no parameter is known to hold it, or more than the address changed, the function is recorded again; a tensor that
goes on moving is copied in every call. Values are the same.

## Example
```python
@capture
def step(x):
    return torch.linalg.inv(state.matrix) @ x

for matrix in matrices:
    state.matrix = matrix
    step(x)
```

## Instead
```python
for matrix in matrices:
    state.matrix.copy_(matrix)
    step(x)
```

## Fix safety
Writing in place changes the tensor for everybody who holds it.

## Known gaps
A function that takes the address from device memory, beside a parameter, is found only where the new memory holds
other values than the old when the tensor moves first.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG109", "binding-refused", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for unbound in case.facts.unbound:
        kernel = f" ({unbound.kernel})" if unbound.kernel else ""
        yield RULE.finding(
            what=f"a recording cannot follow {unbound.path!r} to another address",
            why=f"{unbound.reason}{kernel}; it is recorded again, and copied in every call once it moves often",
            fix=(
                f"write new values into {unbound.path!r} with copy_()  (one copy where you now make a tensor)",
                'for an argument, decorate with inputs="copy"  (one copy a call, and no recording in vain)',
            ),
            path=unbound.path,
        )
