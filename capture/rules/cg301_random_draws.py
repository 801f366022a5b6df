"""The body draws random numbers.

## What it does
Reports the generators that the body draws from, and applies `rng=`: "graphsafe" records the draws, "eager" runs the
call eagerly, "forbid" makes it an error.

## Why it matters
A plain recording would replay the same numbers for ever. With "graphsafe" the generator's offset is an input of the
recording and advances on every replay, as eager code would advance it.

## Example
```python
@capture(rng="forbid")
def step(x):
    return torch.nn.functional.dropout(x, 0.5)
```

## Instead
```python
@capture(rng="graphsafe")
def step(x):
    return torch.nn.functional.dropout(x, 0.5)
```

## Fix safety
"graphsafe" draws the numbers that eager code would draw; "eager" costs the replay.

## Known gaps
Draws outside PyTorch's generators, such as `random.random()`, are only seen when a value drifts between two runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import Draw
from capture.core.findings import Decision, Finding, Severity
from capture.core.options import Rng
from capture.rules._rule import op_text, rule
from capture.rules.case import Case

BY_OPTION: dict[Rng, tuple[Severity, str, tuple[str, ...]]] = {
    "graphsafe": (
        Severity.NOTE,
        "the generator is advanced before each replay as an eager call would advance it",
        (),
    ),
    "eager": (
        Severity.EAGER,
        'rng="eager" asks for functions that draw to run eagerly',
        ('record the draws: rng="graphsafe"  (no cost; the same numbers as eager)',),
    ),
    "forbid": (
        Severity.ERROR,
        'rng="forbid" allows no draws',
        (
            "draw outside and pass the numbers in  (one copy a call)",
            'record the draws: rng="graphsafe"  (no cost; the same numbers as eager)',
        ),
    ),
}


@rule("CG301", "random-draws", severity=Severity.NOTE)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    first: dict[tuple[str, str], Draw] = {}
    for draw in case.facts.draws:
        first.setdefault((draw.generator, draw.device), draw)
    severity, why, fix = BY_OPTION[case.annotation.rng]
    for draw in first.values():
        generator = "the default generator" if draw.generator == "default" else f"generator {draw.generator!r}"
        yield RULE.finding(
            what=f"{op_text(draw.op)} draws from {generator} of {draw.device}",
            why=why,
            fix=fix,
            where=draw.where,
            severity=severity,
        )
