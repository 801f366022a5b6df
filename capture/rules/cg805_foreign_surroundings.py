"""The call comes from within something that has to see the body's own operators.

## What it does
Reports the first call under a transform of `torch.func` or in forward-mode differentiation
(`torch.autograd.forward_ad`), or with gradients under hooks on saved tensors that somebody else has set, as
`torch.utils.checkpoint(..., use_reentrant=False)` does. Such calls run the body as it is.

## Why it matters
A transform rewrites each operator, and a checkpoint counts what each operator saves, in the forward pass and once more
when it computes it again. A replay has no operators, and saves other tensors.

## Example
```python
for block in blocks:             # each decorated with @capture
    x = checkpoint(block, x, use_reentrant=False)
```

## Instead
```python
for block in blocks:
    x = checkpoint(block, x, use_reentrant=True)   # forward and recomputation are replayed

@capture
def step(x, y):                  # or the whole step, with checkpoints and backward pass inside
    loss = loss_of(checkpoint(block, x, use_reentrant=False, preserve_rng_state=False), y)
    loss.backward()
    return loss.detach()
```

## Fix safety
A reentrant checkpoint gives gradients only where an input of it needs some. Without `preserve_rng_state` dropout draws
other values in the recomputation than in the forward pass.

## Known gaps
Dispatch and function modes of others, and tracers, see the body as well; nothing is said about those.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG805", "foreign-surroundings", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    around = case.facts.around
    if around is not None:
        yield RULE.finding(
            what=f"it is called under {around}",
            why="what is around the call has to see each of its operators, and a replay has none",
            fix=_fix(around),
            where=case.facts.defined_at,
        )  # fmt: skip


def _fix(around: str) -> tuple[str, ...]:
    if around.startswith("a transform"):
        return ("capture what the transform gives, as in capture(torch.func.vmap(f))  (no cost)",)
    whole = "capture the whole step, with what is around the call inside  (it is recorded as one)"
    if "checkpoint" not in around:
        return (whole,)
    return whole, "for a checkpoint: use_reentrant=True  (forward pass and recomputation are replayed)"
