"""A result shares memory with an input, or was made outside PyTorch's dispatcher.

## What it does
Reports returned views of arguments and of tensors read in place. A result that no operator made, such as one from
numpy, makes the call eager.

## Why it matters
The view is made again on the caller's tensor at each call: writing to it writes to the input, as in eager code. A
result that no operator made is not part of a recording at all.

## Example
```python
@capture
def step(x):
    return torch.from_numpy(compute(x.shape))
```

## Instead
```python
@capture
def step(x, table):
    return table + 0

step(x, torch.from_numpy(compute(x.shape)))
```

## Fix safety
Returning `view.clone()` gives up that writes show through.

## Known gaps
Views are known by their storage: two tensors made over the same foreign memory count as strangers.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG403", "output-aliases-input", severity=Severity.NOTE)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for output in case.facts.outputs:
        name = repr(output.path) if output.path else "the result"
        if output.kind in ("input-view", "static-view"):
            yield RULE.finding(
                what=f"{name} is a view of {output.source!r}" if output.source else f"{name} is a view of an input",
                why="the view is made again on the caller's own tensor, so writing to one writes to both",
                fix=("return a clone if that is not meant  (one copy a call)",),
                path=output.path,
            )
        elif output.kind == "foreign":
            yield RULE.finding(
                what=f"{name} was made by no operator of PyTorch",
                why="a recording holds operators, so every replay would return the tensor of the recording run",
                fix=(
                    "make the tensor before the call and pass it  (one copy a call)",
                    "make it with a torch operator on the device  (no cost)",
                ),
                path=output.path,
                severity=Severity.EAGER,
            )
