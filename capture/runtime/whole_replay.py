"""Replays of recordings that go one way: the body need not be asked what follows."""

from __future__ import annotations

from typing import Any

from capture.key.signature import Leaf
from capture.observe import islands
from capture.runtime import branches
from capture.runtime.branches import Followed
from capture.runtime.captured import Captured
from capture.runtime.eager_call import run_eagerly
from capture.runtime.replay import replay
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.tree.node import Node
from capture.tree.tree import Tree


def replay_whole(
    captured: Captured, node: Node, tree: Tree, values: tuple[Any, ...], leaves: list[Leaf], run: BodyRun | None
) -> Any:
    """The result of a recording that goes one way: it has no breaks, or nothing follows from what is read there, nor
    from what islands give. One that raises has the body go on."""
    if not node.reads:
        return replay(captured, node, tree, values, leaves, run)
    followed = branches.replay(captured, node, tree, values, leaves, run)
    if followed.node is not None:
        return followed.result
    run = body_run.current() or BodyRun()
    return body_run.during(run, _gone_on, (captured, captured.call(values, leaves), followed, run))


def _gone_on(captured: Captured, bound: Call, followed: Followed, run: BodyRun) -> Any:
    """All was put back, but for what islands did, which do not run again."""
    islands.answer(run, followed.ran)
    try:
        result = run_eagerly(captured, bound, "a formula raised, or an island went another way")
    finally:
        islands.settle(run)
    if followed.interrupt is not None:
        raise followed.interrupt
    return result
