"""The body changes Python state.

## What it does
Finds values that differ after the run and that no replay can put there: objects that the body makes, containers whose
members nobody knows. Finds calls, too, that leave what nobody compares, such as text in a file. Plain values, counters,
and members of lists, dicts and sets are no such change: a replay does them again (CG402).

## Why it matters
A replay does not run the Python code. The state would stay as the recording left it, and so would everything the body
derives from it.

## Example
```python
class Model(torch.nn.Module):
    @capture
    def forward(self, x):
        self.last = Stats(x.shape)
        return x * 2
```

## Instead
```python
class Model(torch.nn.Module):
    def forward(self, x):
        self.last = Stats(x.shape)
        return self.body(x)

    @capture
    def body(self, x):
        return x * 2
```

## Fix safety
Moving the statement out of the body keeps its effect. A counter kept in a tensor is part of the recording.

## Known gaps
State that a library keeps in its own modules is not compared, nor what other packages keep in memory of their C code.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("CG204", "python-state-changed", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for effect in case.facts.effects:
        if effect.kind in ("tensor", "value", "count", "members"):
            continue
        if effect.kind == "call":
            yield RULE.finding(
                what=f"the body calls {effect.path}",
                why="a replay does not run Python code, so what it leaves would be there once and then never again",
                fix=("call it before or after the captured function  (no cost)",),
                where=effect.where,
                path=effect.path,
            )
            continue
        verb = "changes the members of" if effect.kind == "container" else "changes"
        yield RULE.finding(
            what=f"the body {verb} {effect.path!r}: {effect.before} -> {effect.after}",
            why="a replay does not run Python code, so this would change once and then never again",
            fix=(
                f"move the change of {effect.path!r} out of the captured function  (no cost)",
                "keep the value in a tensor and update it in place  (no cost)",
            ),
            where=effect.where,
            path=effect.path,
        )
