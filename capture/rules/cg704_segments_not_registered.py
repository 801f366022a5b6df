"""NCCL would register memory of expandable segments with a graph.

## What it does
Keeps bodies with collectives on a GPU eager where the allocator uses expandable segments and NCCL registers the memory
of captured collectives, as it does unless told otherwise.

## Why it matters
NCCL takes a segment for one allocation, which an expandable one is not. Replays then hang or read other memory, long
after the capture seemed to succeed (pytorch issue 158029).

## Example
```python
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
dist.init_process_group("nccl")

@capture
def step(x):
    dist.all_reduce(x)
    return x * 2
```

## Instead
```python
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
os.environ["NCCL_GRAPH_REGISTER"] = "0"
dist.init_process_group("nccl")

@capture
def step(x):
    dist.all_reduce(x)
    return x * 2
```

## Fix safety
Values are the same. Without registration NCCL copies through buffers of its own, as it does in eager code.

## Known gaps
NCCL reads its setting when a communicator is made; a change after that goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import op_text, rule
from capture.rules.case import Case


@rule("CG704", "segments-not-registered", severity=Severity.EAGER)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    first = next((collective for collective in case.facts.collectives if collective.registers_segments), None)
    if first is not None:
        yield RULE.finding(
            what=f"{op_text(first.op)} would have NCCL register memory of expandable segments with the graph",
            why="NCCL takes a segment for one allocation: replays hang, or read other memory",
            fix=(
                "set NCCL_GRAPH_REGISTER=0 before the process group is made  (NCCL copies through its own buffers)",
                "do without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF  (more fragmentation)",
            ),
            where=first.where,
        )
