"""A container the library cannot open holds tensors.

## What it does
Finds objects among the arguments or results that hold tensors and whose class has more to it than Python tells, such as
one that derives from a class made in C; arguments that have neither a value to compare nor weak references; arguments
that contain themselves; and arguments that Python state holds, too, while the body changes them.

## Why it matters
Tensors inside could be neither bound before a replay nor made afresh after one; the caller would get the old ones.

## Example
```python
class Pair(array.array):
    def __init__(self, a, b):
        self.a, self.b = a, b

@capture
def step(pair):
    return pair.a + pair.b
```

## Instead
```python
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b

@capture
def step(pair):
    return pair.a + pair.b
```

## Fix safety
An object in `static=` is read where it is, with what it holds; every object has a recording of its own. Passing the
tensors themselves is always safe. `capture.register_container` holds for all captured functions of the process.

## Known gaps
Tensors hidden behind properties or in C++ objects are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

FIX = {
    "argument": (
        "name it in static=, if it is one object for many calls, as a cache is  (a recording an object)",
        "pass the tensors themselves, in a tuple, dict or dataclass  (no cost)",
    ),
    "output": ("return the tensors themselves, in a tuple, dict or dataclass  (no cost)",),
}


@rule("CG106", "unknown-container", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    for leaf in case.facts.opaque:
        if leaf.keyless:
            yield RULE.finding(
                what=f"{leaf.role} {leaf.path!r} is a {leaf.type} that cannot be told from another one later",
                why="it has no value to compare, and another object may have its address next",
                fix=(f"give {leaf.type} __eq__ and __hash__, or '__weakref__' among its __slots__  (no cost)",),
                path=leaf.path,
            )
        if leaf.endless:
            yield RULE.finding(
                what=f"{leaf.role} {leaf.path!r} is a {leaf.type} that contains itself, or too many in one another",
                why="containers are opened to find the tensors in them, and these have no end",
                fix=("pass what the body needs in a tuple, dict or dataclass  (no cost)",),
                path=leaf.path,
            )
        if leaf.also is not None:
            yield RULE.finding(
                what=f"{leaf.role} {leaf.path!r} is also {leaf.also!r}, and the body changes it",
                why="the body is recorded with a copy of the argument, which is not what the other place holds",
                fix=("name it in static=, if it is one object for many calls  (a recording an object)",
                     "reach it in one way only, as an argument or there  (no cost)"),
                path=leaf.path,
            )  # fmt: skip
        if leaf.num_tensors == 0:
            continue
        count = "a tensor" if leaf.num_tensors == 1 else f"{leaf.num_tensors} tensors"
        yield RULE.finding(
            what=f"{leaf.role} {leaf.path!r} is a {leaf.type} that holds {count}",
            why="the parts of this type are not known, so its tensors could not be bound to or made by a replay",
            fix=(*FIX[leaf.role], f"capture.register_container({leaf.type}, flatten, unflatten)  (no cost)"),
            path=leaf.path,
        )
