"""The memory of recordings in the form that torch's viewer of memory opens, with names."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from capture.api.decorator import all_states
from capture.core.data import frozen
from capture.runtime.captured import Captured
from capture.torch_private import cuda
from capture.tree.thread_trees import trees_of

_POOL = "capture: pool of recordings"


@frozen(eq=False)
class _Output:
    """The place of one output of a recording."""

    begin: int
    end: int
    name: str
    captured: Captured
    is_used: bool
    """The output's storage is still alive."""

    def is_within(self, begin: int, end: int) -> bool:
        """Whether it overlaps with the bytes from ``begin`` to ``end``."""
        return self.begin < end and self.end > begin


def memory_snapshot(path: str | os.PathLike[str]) -> int:
    """Write a snapshot of memory for https://docs.pytorch.org/memory_viz, as ``torch.cuda.memory._dump_snapshot`` does,
    in which the blocks of recordings have names. Gives the number of blocks that got one.

    A block that holds an output of a recording is named by function, output and recording, at the line where the
    function is defined. Other blocks of our pools (copied inputs, constants, memory that is free between recordings)
    are named as such. On the CPU engine the pools are shown as a device of their own, after the GPUs, as torch's
    allocator does not know them. Bytes; the file is a pickle of plain dicts.

    Raises ``OSError`` where the file cannot be written.
    """
    snapshot = cuda.memory_snapshot()
    states = all_states()
    trees = {id(tree): tree for captured in states for tree in trees_of(captured)}
    pools = {id(tree.pool): tree.pool for tree in trees.values()}.values()
    segments = [segment for pool in pools for segment in pool.snapshot()]
    if segments:
        number = len(snapshot["device_traces"])
        snapshot["device_traces"] = [*snapshot["device_traces"], []]
        snapshot["segments"] = [*snapshot["segments"], *({**segment, "device": number} for segment in segments)]
    outputs = list(_outputs(states))
    named = 0
    for segment in snapshot["segments"]:
        if any(pool.find(segment["address"]) for pool in pools):
            segment["blocks"] = list(_named_blocks(segment, outputs))
            named += len(segment["blocks"])
    Path(path).write_bytes(pickle.dumps(snapshot))
    return named


def _outputs(states: Sequence[Captured]) -> Iterator[_Output]:
    for captured in states:
        for node in (node for entry in captured.entries() for node in list(entry.nodes)):
            plan = node.outputs
            if plan is None:
                continue
            used = {number for number, _, _ in node.live_groups()}
            for number, group in enumerate(plan.groups):
                if number not in plan.owned:
                    what = ", ".join(path or "its result" for path in group.paths) or "a value for its backward pass"
                    name = f"capture: {what} of {captured.annotation.function}, recording {node.number}"
                    begin, end = group.block.address, group.block.address + group.block.nbytes
                    yield _Output(begin, end, name, captured, number in used)


def _named_blocks(segment: dict[str, Any], outputs: Sequence[_Output]) -> Iterator[dict[str, Any]]:
    """The blocks of one segment, named. Memory that no storage holds now is split where outputs begin and end: each
    replay writes them there."""
    at = segment["address"]
    for block in segment["blocks"]:
        begin = block.get("address", at)
        at = begin + block["size"]
        inside = [output for output in outputs if output.is_within(begin, at)]
        cuts = {begin, at}
        if block["state"] == "inactive":
            cuts |= {cut for output in inside for cut in (output.begin, output.end) if begin < cut < at}
        for first, last in itertools.pairwise(sorted(cuts)):
            here = [output for output in inside if output.is_within(first, last)]
            part = {**block, "address": first, "size": last - first}
            if any(output.is_used for output in here):
                part |= {"state": "active_allocated", "requested_size": last - first}
            frames = [_frame(output.name, output.captured) for output in here] or [_frame(_POOL)]
            yield {**part, "frames": [*frames, *block.get("frames", [])]}


def _frame(text: str, captured: Captured | None = None) -> dict[str, Any]:
    place = captured.annotation.defined_at if captured is not None else None
    return {"name": text, "filename": place.file if place else "", "line": place.line if place else 0}
