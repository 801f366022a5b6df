"""A function runs eagerly in the middle of the body: an island.

## What it does
Finds functions marked with `@capture.island`, and `print`, which count as islands wherever the body calls them, and the
`step()` of optimizers that does in each step what no recording does again.

## Why it matters
A recording is cut there: a replay runs the segment before the island, then the function in Python, on the tensors that
the segment gave, and then the segment after it. Each costs its own time and one more launch. That is a note. The
captured function runs eagerly where a recording cannot keep what eager code does: results that need gradients, or an
island that needs them; Python state that the body changed before the island, which would see it as it was; state that
the island changes and the body reads; arguments and results that are no tensors, plain values or containers of these; a
tensor that the island keeps, or gives and keeps.

## Example
```python
@capture
def step(x):
    y = x * 2
    print(y)
    self.last = y
    return y
```

## Instead
```python
@capture
def step(x):
    y = x * 2
    print(y)
    return y
```

## Fix safety
Moving an island behind the captured function leaves the values as they are; it then comes later in the order of
effects.

## Known gaps
A tensor that an island keeps in later calls, though not in the first ones, is a tensor of its own: what the body writes
there afterwards it does not see. State that an island only reads is not looked at: it runs in each call, and finds it
as it is then.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

_FIXES = {
    "gradients": "call it after the captured function, or under torch.no_grad()  (no cost)",
    "detach": "give it the tensor with .detach()  (no cost)",
    "clone": "keep a copy: tensor.clone()  (one copy a call)",
    "order": "change the state after the island, or return the value and set it after the call  (no cost)",
    "inside": "let it find the object by itself: in a closure, a global or self  (no cost)",
}
_OUT = "call it before or after the captured function  (no cost)"


@rule("CG208", "island", severity=Severity.NOTE)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for island in case.facts.islands:
        if island.obstacle is None:
            yield RULE.finding(
                what=f"{island.name}() runs eagerly in every replay",
                why="the recording is cut there: one segment ends, this runs in Python, and another segment begins",
                fix=(_OUT,),
                where=island.where,
            )
            continue
        fix = _FIXES.get(island.fix)
        yield RULE.finding(
            what=f"{island.name}() {island.obstacle}",
            why="a recording could not be cut there and give what eager code gives",
            fix=(fix, _OUT) if fix else (_OUT,),
            where=island.where,
            severity=Severity.EAGER,
        )
