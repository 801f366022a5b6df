"""Something went wrong inside this library.

## What it does
Reports an error that is neither the body's nor what an option asks for: of the code that makes keys, watches, records
or replays.

## Why it matters
The call has eager's result, and eager's effects, but calls like it are not replayed. The traceback is in the log of
`capture`, once a function and place.

## Example
```python
class Odd(tuple):
    def __len__(self):
        raise NotImplementedError

@capture
def f(x, odd):
    return x * odd[0]
```

## Instead
```python
@capture
def f(x, first):
    return x * first
```

## Fix safety
Keeping the object away from the captured function changes nothing else. Nothing has to be done for right results.

## Known gaps
Where a recording already ran, or the error comes from within a run whose results need gradients, it is raised.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG905", "library-fault", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    fault = case.facts.fault
    if fault is not None:
        yield RULE.finding(
            what=f"{fault.kind} inside this library, at {fault.place}: {fault.message}",
            why="something here is of a kind it does not expect; the call has eager's result",
            fix=(
                "report it with the traceback in the log of 'capture'  (calls like this stay eager until then)",
                "keep what it names away from the captured function  (costs nothing)",
            ),
            path=f"{fault.kind} at {fault.place}",
        )
