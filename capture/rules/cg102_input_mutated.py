"""An argument that is not static is written in place.

## What it does
Finds arguments the body mutates without a promise that they keep their address, and has them copied in before each
replay and back after it, unless they are bound (`inputs=`).

## Why it matters
A recorded graph writes to its own buffer. The caller's tensor sees the new values only if they are copied back, which
costs two copies a call.

## Example
```python
@capture
def step(x, cache):
    cache.add_(x)
    return cache.sum(-1)
```

## Instead
```python
@capture(static=["cache"])
def step(x, cache):
    cache.add_(x)
    return cache.sum(-1)
```

## Fix safety
`static=` promises that the same tensor comes back every call. A broken promise is noticed and bound again; it costs
time, never values.

## Known gaps
An operator of another library that writes without saying so in its schema and without raising the version counter is
not seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Policy, Severity
from capture.core.sizes import bytes_text
from capture.rules._rule import is_bound, op_text, rule
from capture.rules.case import Case


@rule("CG102", "input-mutated", severity=Severity.COPY, revision=2)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for info in case.facts.placeholders:
        if info.kind != "argument" or info.static or info.mutation is None or is_bound(case, info):
            continue
        copied = bytes_text(info.tensor.nbytes)
        yield RULE.decision(info.path, Policy.COPY_BACK, f"mutated by {op_text(info.mutation.op)} and not static")
        yield RULE.finding(
            what=f"argument {info.path!r} is written in place and copied in and back",
            why=f"{op_text(info.mutation.op)} writes to the recording's own buffer: {copied} are copied in before and"
            " back after every replay",
            fix=(
                f"add {info.path!r} to static=  (no cost; promises a fixed address)",
                f"return the new value instead of writing to {info.path!r}  (saves the copy back)",
            ),
            where=info.mutation.where,
            path=info.path,
        )
