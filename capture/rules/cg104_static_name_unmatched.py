"""A name in `static=` matched no tensor of the call.

## What it does
Reports names in `static=` whose first part is a parameter, but under which this call had no tensor.

## Why it matters
The promise does nothing: the tensor that was meant is copied on every call, and back if the body writes to it.

## Example
```python
@capture(static=["cache.keys"])
def step(x, cache):
    return x + cache["key"]
```

## Instead
```python
@capture(static=["cache.key"])
def step(x, cache):
    return x + cache["key"]
```

## Fix safety
Correcting the name is safe: a promise that does not hold is noticed and bound again.

## Known gaps
A name that matches under one structure of arguments and not under another is reported for the latter only.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.core.options import suggestion
from capture.rules._rule import names_text, rule
from capture.rules.case import Case


@rule("CG104", "static-name-unmatched", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    paths = case.facts.known_paths
    for name in case.facts.unmatched_static:
        fix = [f"remove {name!r} from static=  (no cost)"]
        if paths:
            fix.insert(0, f"name one of {names_text(paths, most=6)}  (no cost; promises a fixed address)")
        yield RULE.finding(
            what=f"static={name!r} matches no tensor{suggestion(name, paths)}, so it makes nothing static",
            why="a name in static= is the path of a tensor in the call, or the first parts of one",
            fix=fix,
            where=case.annotation.defined_at,
            path=name,
        )
