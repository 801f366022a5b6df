"""Gradients cannot be added to ``.grad`` in eager's order.

## What it does
Reports a function with ``gradients="accumulate"`` whose parameters get gradients from elsewhere in the same backward
pass: from another call of it, another captured function, or eager code.

## Why it matters
Eager adds up the gradients of all uses of a parameter first, and then adds the sum to ``.grad``. A recorded backward
pass that adds its own part to ``.grad`` makes another order, which may differ in the last bit. Calls from then on are
recorded as with ``gradients="autograd"``, where the order is eager's.

## Example
```python
block = capture(block, gradients="accumulate")
loss = (block(x) - block(y)).square().mean()
loss.backward()
```

## Instead
```python
block = capture(block)
loss = (block(x) - block(y)).square().mean()
loss.backward()
```

## Fix safety
Values are eager's. Autograd has a node for each parameter in every pass, 1 to 3 us of host time each.

## Known gaps
The pass in which it is noticed adds in the other order. Eager code that begins to use a parameter later is noticed
late, as passes are looked at more and more rarely.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG503", "gradient-order", severity=Severity.NOTE, decides=False)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    order = case.facts.gradient_order
    if order is not None:
        yield RULE.finding(
            what=f"{order.shared_with} in the same backward pass gives its parameters gradients, too",
            why='eager adds these up before it adds to .grad, which gradients="accumulate" cannot',
            fix=(
                'gradients="autograd", which it is recorded with from now on  (1 to 3 us of host time a parameter)',
                "one captured function around all uses  (no cost)",
            ),
            where=order.where,
        )
