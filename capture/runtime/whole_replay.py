"""Replays of recordings that go one way: the body need not be asked what follows."""

from __future__ import annotations

from typing import Any

from capture.key.signature import Leaf
from capture.runtime import branches
from capture.runtime.captured import Captured
from capture.runtime.eager_call import run_eagerly
from capture.runtime.replay import replay
from capture.state.body_run import BodyRun
from capture.tree.node import Node
from capture.tree.tree import Tree


def replay_whole(
    captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], run: BodyRun | None
) -> Any:
    """The result of a recording that goes one way: it has no breaks, or nothing follows from what is read there."""
    if not node.reads:
        return replay(captured, node, tree, values, leaves, run)
    followed = branches.replay(captured, node, tree, values, leaves, run)
    if followed.raises:  # all was put back
        return run_eagerly(captured, captured.call(values, leaves), "a formula raised, as the body does")
    assert followed.node is node, "what is read anew is not compared"
    return followed.result
