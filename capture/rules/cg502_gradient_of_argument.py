"""A backward pass inside the body leaves the gradient of an argument behind, which cannot be an input of its own.

## What it does
Finds arguments to whose ``.grad`` the body's own backward pass accumulates, in functions whose arguments are padded
(``buckets=``), or whose results need gradients, too. The function runs eagerly. In all others such gradients are inputs
and effects of the recording.

## Why it matters
An argument is another tensor in every call, with another ``.grad`` or none: a recording would add to the one that it
was made with. A padded argument's gradient has the padded shape.

## Example
```python
@capture(buckets={"x": {0: "pow2"}})
def step(x):
    loss = (x * 2).square().sum()
    loss.backward()
    return loss.detach()

step(x)
forces = -x.grad
```

## Instead
```python
@capture(buckets={"x": {0: "pow2"}})
def step(x):
    energy = (x * 2).square().sum()
    (gradient,) = torch.autograd.grad(energy, x)
    return energy.detach(), -gradient
```

## Fix safety
`torch.autograd.grad` computes the same gradient and leaves ``.grad`` alone, also that of parameters.

## Known gaps
A ``.grad`` that the body sets itself, without a backward pass, counts as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import gradients_left
from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG502", "gradient-of-argument", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for path, argument in gradients_left(case.facts).items():
        yield RULE.finding(
            what=f"a backward pass inside the body leaves {path!r} behind",
            why="an argument is another tensor in every call, with another gradient or none",
            fix=(
                f"torch.autograd.grad(loss, {argument.path}) inside, and return the result  (no cost)",
                f"static=[{argument.path!r}], if it is the same tensor in every call  (no cost)",
            ),
            where=argument.first_use,
            path=path,
        )
