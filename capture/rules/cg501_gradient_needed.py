"""What the function leaves behind needs gradients.

## What it does
Finds results, attributes and written tensors that carry an autograd graph when the body is over. A backward pass inside
the body leaves none, so whole training steps are recorded.

## Why it matters
A backward pass outside needs tensors that the forward pass inside saved. A replay would overwrite them, so a forward
pass whose backward comes later is not recorded yet.

## Example
```python
@capture
def step(model, x):
    return model(x)
```

## Instead
```python
@capture
def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()

@capture
@torch.no_grad()
def evaluate(model, x):
    return model(x)
```

## Fix safety
A step moved into the function as a whole computes what it computed before.
`torch.no_grad()` is safe for inference; under it no gradient reaches the parameters.

## Known gaps
One finding stands for all operators of the call; the first is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture._findings import Case, Decision, Finding, Severity
from capture.rules._rule import names_text, rule


@rule("CG501", "gradient-needed", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    uses = case.facts.gradients
    if not uses:
        return
    paths = dict.fromkeys(use.path for use in uses if use.path)
    asked = f", asked for by {names_text(paths, most=2)}" if paths else ""
    yield RULE.finding(
        what=f"the result of {uses[0].op} needs gradients{asked}",
        why="a replay would overwrite what a backward pass outside of the function needs",
        fix=(
            "capture the whole step: backward and optimizer inside, detached results  (no cost)",
            "call it under torch.no_grad() or torch.inference_mode()  (no cost; no gradients)",
            "detach the inputs that need no gradients  (no cost)",
        ),
        where=uses[0].where,
        path=uses[0].path,
    )
