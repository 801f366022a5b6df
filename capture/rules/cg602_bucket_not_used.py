"""Calls of some size cannot be padded to a size that is recorded.

## What it does
Reports what a padded call, under `buckets=`, did otherwise than the unpadded body: another value in a result or in
memory that the body writes, an error, a result on the memory of an argument, a value that the host reads. A body with
collectives is not padded at all: comparing takes runs that other ranks do not make.

## Why it matters
Such calls keep their own size: each one is recorded by itself, as without `buckets=`, up to `max_recordings` of them.
The numbers are right either way.

## Example
```python
@capture(buckets={"x": {0: (4, 8)}})
def step(x):
    return x - x.mean(0)
```

## Instead
```python
@capture(buckets={"x": {0: (4, 8)}, "rows": {0: (4, 8)}})
def step(x, rows):  # 1 for a row that is real, 0 for padding
    return x - (x * rows[:, None]).sum(0) / rows.sum()
```

## Fix safety
A tolerance lets kernels round otherwise at another size, as matrix products do; take one that your program bears. A
mask as an argument keeps padding out of sums, and costs one operator for each.

## Known gaps
What differs for some values alone is found when such values are compared: the first, fourth, sixteenth ... call of
each size is.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import BucketRefusal
from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

_FIXES = {
    "differs": (
        'allow for other roundings: tolerance=1e-5, or {"output": (1e-5, 1e-6)}  (results are not eager\'s bits)',
        "keep padding out of what it reaches, with a mask or the lengths as arguments  (one operator or two)",
    ),
    "raises": ('another fill=, such as fill={"index": 0}  (no cost)',),
    "writes": ("write a tensor that is no part of buckets=, or return the new values  (no cost)",),
    "aliases": ("return a copy: x.clone()  (one copy)",),
    "reads": ("move what reads the value out of the captured function  (no cost)",),
    "gradients": ("call it under torch.no_grad(), or leave out buckets= where it is trained  (no cost)",),
    "communicates": ("capture what lies between the collectives apart, with buckets=  (more launches)",),
}


def _what(refusal: BucketRefusal) -> str:
    path = f"{refusal.path!r}"
    return {
        "differs": f"{path} of a padded call differs from the unpadded body's: {refusal.detail}".removesuffix(": "),
        "raises": f"a padded call raises where the body does not: {refusal.detail}",
        "writes": f"the body writes {path}, which is padded",
        "aliases": f"{path} lies in memory that the call was given",
        "reads": "the body reads values on the host, and changes something",
        "gradients": "results need gradients",
        "communicates": "other ranks take part in the body, and would have to run it for each comparison, too",
    }[refusal.kind]


@rule("CG602", "bucket-not-used", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    refusal = case.facts.bucket
    if refusal is None:
        return
    yield RULE.finding(
        what=_what(refusal),
        why=f"so calls with {refusal.sizes} are not padded: each size is recorded by itself",
        fix=_FIXES[refusal.kind],
        path=refusal.path or None,
    )
