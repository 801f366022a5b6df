"""A tensor is not a plain strided tensor.

## What it does
Finds tensor subclasses that cannot be opened and sparse, quantized or nested tensors among the inputs and results, and
tensors that hold other tensors, such as a `DTensor`, where gradients pass through them at the call's border.

## Why it matters
They hold several buffers, or none, behind one object. One address per tensor, which is what a recording keeps, does
not describe them. What `__tensor_flatten__` opens is recorded as the plain tensors inside, which know nothing of the
graph that the outer tensor is part of.

## Example
```python
@capture
def step(weight, x):
    return weight @ x

step(torch.eye(4).to_sparse(), x)
```

## Instead
```python
@capture
def step(weight, x):
    return weight @ x

step(torch.eye(4), x)
```

## Fix safety
`to_dense()` and `as_subclass(torch.Tensor)` give up what the subclass adds; check that the body does not need it.

## Known gaps
`torch.nn.Parameter` is plain and not reported. Parameters that are a `DTensor` may need gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG107", "unsupported-subclass", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    given = {leaf.type for leaf in case.facts.subclasses if not leaf.path.startswith("output")}
    for leaf in case.facts.subclasses:
        if leaf.path.startswith("output") and leaf.type in given:
            continue  # it comes of what went in
        named = repr(leaf.path) if leaf.path else ""
        yield RULE.finding(
            what=f"{named or 'a tensor that the body reads'} is a {leaf.type}, no plain strided tensor",
            why="a recording keeps one address a tensor, and this type keeps its values elsewhere",
            fix=(
                f"pass the plain tensors inside {named or 'it'}  (no cost)",
                f"convert it before the call, as by {leaf.path or 'tensor'}.{_conversion(leaf.type)}",
            ),
            where=leaf.where,
            path=leaf.path or None,
        )


def _conversion(kind: str) -> str:
    """The call that makes a plain tensor of it, and its cost."""
    if "Nested" in kind or "nested" in kind:
        return "to_padded_tensor(0.0)  (one copy a call)"
    is_layout = kind.endswith(" tensor") or "sparse" in kind
    return "to_dense()  (one copy a call)" if is_layout else "as_subclass(torch.Tensor)  (no cost)"
