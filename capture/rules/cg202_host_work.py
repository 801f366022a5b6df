"""Work that a device graph cannot hold.

## What it does
Finds operators on CPU tensors beside an accelerator, copies between the two, and, on any device, operators tagged as
unsafe for graphs, tensors made of NumPy's arrays, operators of other libraries that get the address of a tensor as a
number, numbers drawn by Python's `random` or by NumPy, elements taken from an iterator, and modes left otherwise.

## Why it matters
A graph of device kernels replays device work only. CPU work would be done once, while recording, and its result would
be read again by every replay.

## Example
```python
@capture
def step(x):
    return x * torch.tensor(2.0).to(x.device)
```

## Instead
```python
@capture
def step(x, scale):
    return x * scale
```

## Fix safety
Making a constant on the device once, outside the body, gives the same values.

## Known gaps
CPU work outside PyTorch, such as numpy on arrays made earlier, is not seen. What of it becomes a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.facts import HostWork
from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import accelerators, op_text, rule
from capture.rules.case import Case

_SPLIT = "move it before or after the captured function  (splits the work in two)"
WORDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unsafe": (
        "cannot be part of a recording",
        "it waits for the device or decides on the host, where a replay does nothing",
        ("use an operator that stays on the device  (no cost)", _SPLIT),
    ),
    "draw": (
        "cannot be part of a recording",
        "a replay runs no Python, so the numbers drawn in the recorded call would stay for ever",
        (
            "draw with torch, as by torch.rand  (no cost)",
            "draw before the call, and pass what was drawn as a tensor  (one small copy a call)",
        ),
    ),
    "iterator": (
        "cannot be part of a recording",
        "a replay runs no Python, so the iterator would not go on",
        ("take from it before the call, and pass what it gave  (no cost)", "pass a list instead  (no cost)"),
    ),
    "mode": (
        "cannot be part of a recording",
        "a replay runs no Python, so the mode would stay as it is",
        ("set it before the call, or put it back in the function  (no cost)",),
    ),
    "array": (
        "makes a tensor of an array",
        "arrays are written in place and nothing tells of it: a recording would keep the values of now",
        (
            "pass torch.from_numpy(array) as an argument, whose memory every call reads  (no cost)",
            "make the tensor once, outside, if the array never changes  (no cost)",
        ),
    ),
    "address": (
        "gets the address of a tensor as a number",
        "nothing tells when the tensor lies elsewhere: a recording would go on with the memory of now",
        ("have the operator take the tensor itself  (no cost)", _SPLIT),
    ),
}
"""What the operator does, why it matters and what helps, by kind of work."""
BY_TEXT = {"drawing from ": "draw", "taking from ": "iterator", "leaving another ": "mode"}
"""Work that is no operator: the beginning of its text, and its key in ``WORDS``."""


@rule("CG202", "host-work", severity=Severity.EAGER, revision=5)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    devices = accelerators(case.facts.devices)
    for work in case.facts.host_work:
        kind = next((kind for beginning, kind in BY_TEXT.items() if work.op.startswith(beginning)), work.kind)
        if kind in WORDS:
            what, why, fix = WORDS[kind]
            yield RULE.finding(what=f"{op_text(work.op)} {what}", why=why, fix=fix, where=work.where)
        elif devices:
            yield _beside(work, devices[0])


def _beside(work: HostWork, device: str) -> Finding:
    if work.kind == "copy":
        what = f"{op_text(work.op)} copies between the CPU and {device}"
        fix = f"keep the tensor on {device}, or copy it before the call and pass it  (no cost)"
    else:
        what = f"{op_text(work.op)} runs on the CPU beside {device}"
        fix = f"make its tensors on {device}  (no cost)"
    return RULE.finding(
        what=what,
        why="a replay runs device work only: what the CPU did while recording would be read again by every replay",
        fix=(fix, "move the CPU work before or after the captured function  (no cost)"),
        where=work.where,
    )
