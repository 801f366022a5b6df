"""A backward pass inside the body leaves the gradient of an argument behind, or adds to it.

## What it does
Finds arguments to whose ``.grad`` the body's own backward pass accumulates, unless `static=` names them. The function
runs eagerly.

## Why it matters
An argument is another tensor in every call, with another ``.grad`` or none: a recording would add to the one that it
was made with.

## Example
```python
@capture
def step(x):
    loss = (x * 2).square().sum()
    loss.backward()
    return loss.detach()

step(x)
forces = -x.grad
```

## Instead
```python
@capture
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

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG502", "gradient-of-argument", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    arguments = [
        placeholder
        for placeholder in case.facts.placeholders
        if placeholder.kind == "argument" and not placeholder.static
    ]
    sources = {f"{argument.path}.grad": argument for argument in arguments}
    left = [effect.path for effect in case.facts.effects if effect.kind != "python"]
    read = [placeholder.path for placeholder in case.facts.placeholders if placeholder.kind == "implicit"]
    for path in dict.fromkeys((*left, *read)):
        argument = sources.get(path)
        if argument is not None:
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
