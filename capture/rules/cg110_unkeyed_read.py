"""The body reads a property of a tensor that is not part of the key.

## What it does
Finds code that asks an argument in Python for its place in its storage, how often it was written, what it is a view
of, or an attribute that was put on it; state for how often it was written; and operators that count from where an
argument's storage begins, or look beside the argument's own elements.

## Why it matters
Calls are told apart by dtype, shape, stride, device and a few more facts of each tensor. None of these answers is among
them, nor is what lies beside an argument copied: a recording would keep the answer, or the memory, of now.

## Example
```python
@capture
def windows(x):
    return x.as_strided((x.numel() - 7, 8), (1, 1), x.storage_offset()).amax(-1)
```

## Instead
```python
@capture
def windows(x):
    return x.as_strided((x.numel() - 7, 8), (1, 1)).amax(-1)
```

## Fix safety
`as_strided` without an offset begins at the tensor's own first element, which is where `storage_offset()` points.

## Known gaps
Whether a tensor is the same object as another is not seen. Nor is what code in torch itself asks.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case

_ASK = "ask before the call and pass the answer  (one recording an answer)"
_OFFSET = "leave as_strided's offset out, to begin at the tensor's own first element  (no cost)"
_SLICE = "pass the whole tensor, and slice it in the body  (no cost)"


@rule("CG110", "unkeyed-read", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    arguments = {info.path: info for info in case.facts.placeholders if info.kind == "argument"}
    for read in case.facts.unkeyed:
        path = next((path for path in read.paths if path in arguments), None)
        if read.kind == "answer":
            yield RULE.finding(
                what=f"{read.name} is asked of {path or read.paths[0]!r}",
                why="the next call may answer otherwise and nothing checks that: a recording would keep this answer",
                fix=(_OFFSET if read.name.endswith(".storage_offset") else _ASK,),
                where=read.where,
                path=path,
            )
        elif path is not None and read.kind == "place":
            yield RULE.finding(
                what=f"{read.name} counts from where the storage of {path!r} begins",
                why="the next call's tensor may begin elsewhere in its storage, and nothing checks that",
                fix=(_OFFSET, _SLICE),
                where=read.where,
                path=path,
            )
        elif path is not None and not arguments[path].static:  # static is read where it is, or recorded again
            yield RULE.finding(
                what=f"{read.name} looks at memory beside {path!r}",
                why="an argument is copied for a recording; what lies around it in the caller's memory is not",
                fix=(_SLICE, f"add {path!r} to static=  (no cost; promises a fixed address)"),
                where=read.where,
                path=path,
            )
