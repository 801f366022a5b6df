"""Replay: run a recording that was found to fit, and build the call's result of what it left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from capture.key.signature import Leaf
from capture.runtime.captured import Captured
from capture.state import body_run
from capture.tree.node import Node
from capture.tree.tree import Tree


def replay(captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf]) -> Any:
    """Run it, and stand on its node."""
    recording, outputs = node.recording, node.outputs
    assert recording is not None
    assert outputs is not None
    in_place = bool(tree.lingering) and tree.let_go(node)
    if (run := body_run.current()) is not None:
        run.replayed = True
    recording.replay(leaves)
    return build_result(captured, node, tree, values, leaves, in_place=in_place)


def build_result(
    captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], *, in_place: bool = False
) -> Any:  # fmt: skip
    """What a recording that just ran gave. ``in_place``: see ``OutputPlan.build``."""
    outputs = node.outputs
    assert outputs is not None
    if node.written:
        count_writes(node.written, leaves)
    result: Any
    if outputs.single is not None:
        result = outputs.build_single()
    else:
        roots = lambda: captured.call(values, leaves).named_roots()  # noqa: E731 - a call is made only if it is asked for
        result = outputs.build(tree.pool, leaves, node.statics.__getitem__, roots, in_place=in_place)
    if node.program is not None:
        result.program, result.is_replay = node.program, True
    tree.stand_on(node)
    captured.log.counters.replays += 1
    return result


def count_writes(positions: Sequence[int], leaves: Sequence[Any]) -> None:
    """Managed inputs are written through tensors of the recording's own, as in the recording run are inputs on whose
    memory Python state lies, too; autograd must see it on the caller's."""
    for position in positions:
        if not leaves[position].is_inference():
            torch.autograd.graph.increment_version(leaves[position])
