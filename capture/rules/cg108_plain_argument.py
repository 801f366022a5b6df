"""An argument is copied in, bound, or read in place if it is static.

## What it does
Decides the policy of every argument that no other rule raises. Static ones stay where they are. With `inputs="bind"`,
and by default from 1 MiB on, an argument is bound: kernels are pointed at the caller's tensor before a replay, and
nothing is copied. All others are copied into the recording's own buffer: by nodes of a CUDA graph where there are few,
else in one batch.

## Why it matters
The caller may pass a tensor at any address, reuse it and free it. A small one is copied in little time; the copy of a
large one can take longer than the kernels that read it.

## Example
```python
@capture
def step(x, table):
    return x + table
```

## Instead
```python
@capture(static=["table"])
def step(x, table):
    return x + table
```

## Fix safety
`static=` promises that the same tensor comes back every call. A broken promise is noticed and bound again. Bound
arguments need no promise: a second capture tells which parameters of which kernels hold the address, and the first
replay at another one is compared with eager bit for bit. What cannot be bound is copied; so is what goes to a body
that communicates, as a rank that ran it once more to compare would do so alone.

## Known gaps
An argument the body does not read is copied as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Policy, Severity
from capture.core.sizes import bytes_text
from capture.rules._rule import is_bound, rule
from capture.rules.case import Case


@rule("CG108", "plain-argument", severity=Severity.NOTE, revision=4)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for info in case.facts.placeholders:
        if info.kind != "argument":
            continue
        if info.static:
            yield RULE.decision(info.path, Policy.STATIC, "named in static=")
        elif is_bound(case, info):
            saved = bytes_text(info.tensor.nbytes)
            yield RULE.decision(info.path, Policy.BIND, f"read in place wherever it is: {saved} a call are not copied")
        else:
            much = bytes_text(info.tensor.nbytes)
            yield RULE.decision(info.path, Policy.COPY, f"arguments are copied in by default: {much} a call")
