"""Work that a device graph cannot hold.

## What it does
Finds operators on CPU tensors beside an accelerator, copies between the two, and, on any device, operators tagged as
unsafe for graphs, tensors on NumPy's arrays that are written meanwhile, share memory with a tensor or are too large to
be compared, operators of other libraries that get the address of a tensor as a number, numbers drawn by Python's
`random` or by NumPy, seeds, elements taken from an iterator, files, and modes left otherwise.

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
from capture.rules._host_work import BY_TEXT, WORDS
from capture.rules._rule import accelerators, op_text, rule
from capture.rules.case import Case


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
