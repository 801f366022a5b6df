"""The body reads a tensor that is no argument.

## What it does
Decides how parameters, buffers, attributes and tensors of closures, globals and containers reach the graph: they are
read where they live. One the body replaces is bound anew on every call. One whose owner cannot be found makes the
call eager.

## Why it matters
A recorded graph keeps addresses, not names. What the owner holds is looked up again on every call, so that a swapped
tensor is noticed; without an owner there is nowhere to look.

## Example
```python
tables = iter([torch.zeros(4), torch.ones(4)])

@capture
def step(x):
    return x + next(tables)
```

## Instead
```python
@capture
def step(x, table):
    return x + table
```

## Fix safety
Passing the tensor as an argument costs a copy unless it is named in `static=`.

## Known gaps
A tensor reached only through an object of another library, such as a C++ module, has no owner that can be found: the
buckets of `DistributedDataParallel` have one only if the gradients are views of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from capture.core.facts import PlaceholderInfo
from capture.core.findings import Decision, Finding, Policy, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

NOTED_OWNERS = {"closure": "a closure", "global": "a global variable", "item": "a container's item"}


@rule("CG105", "implicit-input", severity=Severity.NOTE)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for info in case.facts.placeholders:
        if info.kind != "implicit":
            continue
        if info.owner == "unknown":
            yield RULE.decision(info.path, Policy.EAGER, "implicit input without a known owner")
        elif info.replaced:
            yield RULE.decision(info.path, Policy.STATIC, "the body stores another tensor here: bound anew")
            yield _replaced(info)
        else:
            yield RULE.decision(info.path, Policy.STATIC, sys.intern(f"{info.owner}, read where it lives"))
            if info.owner in NOTED_OWNERS:
                yield _noted(info)
    unknown = [info for info in case.facts.placeholders if info.kind == "implicit" and info.owner == "unknown"]
    if unknown:  # one stands for all
        is_of_torch = case.facts.function.startswith("torch.")  # what was captured is a method that torch made or has
        yield _unknown(unknown[0], len(unknown), communicates=bool(case.facts.collectives), is_of_torch=is_of_torch)


_PASSED = ("pass it as an argument  (one copy a call)", "keep it on an attribute of self  (no cost)")
_AROUND = ("capture a function that calls the compiled module: capture(lambda x: compiled(x))  (no cost)",)


def _unknown(info: PlaceholderInfo, count: int, *, communicates: bool, is_of_torch: bool) -> Finding:
    buckets = "wrap with DistributedDataParallel(gradient_as_bucket_view=True), if it is that  (no cost)"
    code = info.first_use.code if info.first_use is not None else ""
    scaler = "compute in bfloat16, which needs no gradient scaler, if it is a scaler's  (another type)"
    origin = "a tensor of unknown origin," if count == 1 else f"{count} tensors of unknown origin, such as"
    return RULE.finding(
        what=f"the body reads {origin} {info.tensor}",
        why="a recorded graph keeps the address, and without an owner nobody can tell when another tensor takes over",
        fix=(
            *([buckets] if communicates else []),
            *([scaler] if "scale" in code else []),
            *(_AROUND if is_of_torch else _PASSED),
        ),
        where=info.first_use,
        path=info.path,
        severity=Severity.EAGER,
    )


def _replaced(info: PlaceholderInfo) -> Finding:
    return RULE.finding(
        what=f"{info.path!r} is read and then replaced by another tensor",
        why="its address changes on every call, so the recording is bound to it anew before each replay",
        fix=(f"write new values into {info.path!r} with copy_()  (no cost at replay)",),
        where=info.first_use,
        path=info.path,
    )


def _noted(info: PlaceholderInfo) -> Finding:
    return RULE.finding(
        what=f"{info.path!r} comes from {NOTED_OWNERS[info.owner]} and is read where it lives",
        why="a replay reads the tensor found there at each call; another tensor there is bound again",
        fix=("pass it as an argument if it changes often  (one copy a call)",),
        where=info.first_use,
        path=info.path,
    )
