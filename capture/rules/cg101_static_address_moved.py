"""A tensor that is read where the caller keeps it was found at another address.

## What it does
Reports each static argument or implicit input whose storage address differs from that of an earlier call.

## Why it matters
A recorded graph reads the address it was recorded with. A replay has to be bound to the new address first, so an
address that moves on every call costs host time on every call.

## Example
```python
@capture(static=["cache"])
def step(x, cache):
    cache.add_(x)
    return cache.sum(-1)

for x in batches:
    step(x, torch.zeros_like(x))
```

## Instead
```python
cache = torch.zeros_like(batches[0])
for x in batches:
    cache.zero_()
    step(x, cache)
```

## Fix safety
Writing in place changes the tensor for everybody who holds it; dropping the name from `static=` is always safe.

## Known gaps
Only the address is compared: a tensor freed and allocated anew at the same address is not noticed, and need not be.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.core.sizes import bytes_text
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG101", "static-address-moved", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    placeholders = {info.path: info for info in case.facts.placeholders}
    for moved in case.facts.moved:
        info = placeholders.get(moved.path)
        implicit = info is not None and info.kind == "implicit"
        word = "implicit input" if implicit else "static argument"
        fix = [f"write new values into {moved.path!r} with copy_()  (one copy where you now make a tensor)"]
        if not implicit:
            cost = f"{bytes_text(info.tensor.nbytes)} a call" if info else "one copy a call"
            fix.append(f"drop {moved.path!r} from static= and let it be copied in  ({cost})")
        yield RULE.finding(
            what=f"{word} {moved.path!r} is at a new address",
            why=f"a recorded graph reads the address it was recorded with: the tensor was at {moved.before_addr:#x}"
            f" and is at {moved.after_addr:#x}, so the recording is bound again",
            fix=fix,
            where=moved.where,
            path=moved.path,
        )
