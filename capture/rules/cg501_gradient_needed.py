"""The results need gradients.

## What it does
Finds operators whose result requires grad while the body runs.

## Why it matters
A backward pass needs tensors that the forward pass saves. A replay would overwrite them, so training is not recorded
yet.

## Example
```python
@capture
def step(model, x):
    return model(x)
```

## Instead
```python
@capture
@torch.no_grad()
def step(model, x):
    return model(x)
```

## Fix safety
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
        why="training is not recorded yet: a replay would overwrite what the backward pass needs",
        fix=(
            "call it under torch.no_grad() or torch.inference_mode()  (no cost; no gradients)",
            "detach the inputs that need no gradients  (no cost)",
        ),
        where=uses[0].where,
        path=uses[0].path,
    )
