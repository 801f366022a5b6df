"""Checked replays: run a recording that fits, and compare it with the body where that is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture.core.config import current as current_config
from capture.engines.base import Move
from capture.key.signature import Leaf
from capture.observe.capture_lock import locked
from capture.runtime import rebind, verify
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.phases import note_difference
from capture.runtime.replay import replay
from capture.state import body_run
from capture.tree.node import Node
from capture.tree.tree import Tree


def verifies(captured: Captured) -> bool:
    return captured.annotation.verify != "off" or current_config().verify != "off"


def replay_checked(
    captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree,
    learned: Sequence[Move] = (),
) -> Any:  # fmt: skip
    """Run a recording that fits, and compare it with eager where that is due, or where it ``learned`` new addresses."""
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    if not learned and not (verifies(captured) and verify.is_due(captured, node)):
        return replay(captured, node, tree, values, leaves, body_run.current())
    bound = captured.call(values, leaves, entry)
    verified = verify.verified(captured, entry, node, tree, bound)
    if learned:
        locked(tree.make_room, captured.log)  # each recording learns once: what all of them need to be compared is much
        against = f"{verified.differs} differs from eager at the new address" if verified.is_wrong else None
        against = verified.undecided or against
        if against is not None:
            rebind.distrust(captured, entry, node, learned, against)
    elif verified.differs is not None:
        note_difference(captured, entry, tree, verified.differs, is_wrong=verified.is_wrong)
    return verified.result if verified.has_result else verify.run_body(captured, bound)
