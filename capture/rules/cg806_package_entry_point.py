"""A model package of AOTInductor was loaded for many threads.

## What it does
Finds calls of packages on a device whose runner was made without `run_single_threaded=True`, before anything is
captured. A package that was compiled before torch had this runner has to be compiled again; torch says so when it is
loaded.

## Why it matters
Such a runner records an event after each run and asks it before the next one. No graph can hold that: the capture
fails, and the event with it, so that later calls of the package fail, too.

## Example
```python
model = torch._inductor.aoti_load_package("decoder.pt2")
decode = capture(model)
```

## Instead
```python
model = torch._inductor.aoti_load_package("decoder.pt2", run_single_threaded=True)
decode = capture(model)
```

## Fix safety
The values are the same. A package loaded so must not be called by two threads at once.

## Known gaps
No binding of torch tells how a package was loaded; it is noted when one is loaded. A function that calls one that was
loaded before `from capture import capture` runs eagerly. On the CPU either runner is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

_LOAD = "run_single_threaded=True"
_ONE = "(no cost, but one thread at a time may call it)"


@rule("CG806", "package-entry-point", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for runner in case.facts.runners:
        what, fix = "a package of AOTInductor is loaded for many threads", f"load it with {_LOAD}"
        if runner.entry == "unknown":
            what = "nothing tells whether a package of AOTInductor is loaded for one thread or for many"
            fix = f"load it after `from capture import capture`, with {_LOAD}"
        yield RULE.finding(
            what=what,
            why="the runner for many threads asks events of its own: a capture would fail, and the runner with it",
            fix=[f"{fix}  {_ONE}"],
            where=runner.where,
        )
