"""The body runs one operator or none, or its replays take longer than the body.

## What it does
Reports bodies in which a replay would replace at most one operator, and functions that run eagerly as replays of their
recordings took longer than the body. That is measured in several calls, and the shortest are compared: on the CPU for
all recordings, those of forward and backward passes together, on a device for those in segments.

## Why it matters
A replay saves the host time between operators. With one operator there is none, and the copies of the arguments come
on top.

## Example
```python
@capture
def double(x):
    return x * 2
```

## Instead
```python
@capture
def step(x):
    return torch.relu(x * 2 + 1)
```

## Fix safety
Removing the decorator is safe: eager values are the same.

## Known gaps
Operators are counted, not timed: a single operator that launches many kernels may pay.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import SlowReplay
from capture.core.findings import Decision, Finding, Severity
from capture.rules._host_reads import FUSED, optimizer_fixes
from capture.rules._rule import rule, tensor_setting
from capture.rules.case import Case


def _fixes_of_optimizers(names: tuple[str, ...]) -> Iterator[str]:
    """Their steps run eagerly between two segments, which is what most of the time goes into."""
    for name in names:
        yield from optimizer_fixes(name, on_accelerator=False)
        if name in FUSED:
            yield tensor_setting("lr", name)


def _why(slow: SlowReplay) -> str:
    """What the time goes into."""
    operators = f"{slow.operators} operator{'s' * (slow.operators != 1)}"
    if not slow.breaks:
        return (
            f"it runs {operators}, and to compare the call and hand out results takes longer than Python between them"
        )
    places = f"{slow.breaks} places" if slow.breaks > 1 else "one place"
    return f"between its {operators} it goes back to Python at {places}, for values that the host reads or for islands"


@rule("CG902", "recording-does-not-pay", severity=Severity.NOTE)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    slow = case.facts.slow_replay
    if slow is not None:
        yield RULE.finding(
            what=f"a replay takes {slow.replay:.0f} us, and the body {slow.body:.0f} us",
            why=_why(slow),
            fix=(
                *_fixes_of_optimizers(slow.optimizers),
                "capture a function further out, which runs more operators in a call  (no cost)",
                *(("read values on the host outside of the function  (no cost)",) if slow.breaks else ()),
                "set CAPTURE_DROP_SLOW=0 to keep recordings, as for tests on a CPU  (replays are slower than eager)",
            ),
            where=slow.where,
            severity=Severity.ERROR if case.annotation.fallback == "error" else Severity.EAGER,
        )
        return
    count = case.facts.num_ops
    if count <= 1 and case.facts.runs:
        yield RULE.finding(
            what="the body runs one operator" if count else "the body runs no operator",
            why="a replay saves the host time between operators, and here there is none to save",
            fix=("capture a function further out  (no cost)", "remove the decorator  (no cost)"),
            where=case.facts.defined_at,
        )
