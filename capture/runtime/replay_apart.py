"""Replays apart: what follows a fast path for a call that is replayed as another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capture.core.data import frozen
from capture.key.signature import Leaf
from capture.native import MISS
from capture.runtime.buckets import Trim, Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.replay import Commit, tell
from capture.runtime.whole_replay import replay_whole
from capture.tree.node import Node
from capture.tree.tree import Tree


@frozen(eq=False)
class GoesOnApart:
    """What follows a fast path for a call that is replayed with padding, or with another number."""

    captured: Captured
    trim: Trim | None = None
    own_values: Callable[[], Values | None] = lambda: None
    """Gives the caller's own values, where the body can go on with them."""

    @property
    def attach(self) -> Callable[..., Any] | None:
        """A function that makes the call's result of what C replayed; None where nothing has to be done."""
        trim = self.trim
        return None if trim is None else lambda result, leaves, node: trim(result)

    def replay(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf]) -> Any:
        """Run a recording that was found to fit."""
        own = self.own_values()
        result = replay_whole(self.captured, node, tree, values if own is None else own, leaves, None)
        return result if self.trim is None else self.trim(result)

    def tell(self, errors: list[BaseException]) -> None:
        """Report exceptions that came in the middle of a replay, which was completed all the same."""
        tell(self.captured, errors)

    def raised(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf], error: BaseException) -> Any:
        """A replay ended in an error. The caller's own sizes are not known here."""
        own = self.own_values()
        commit = Commit(self.captured, node, tree, values if own is None else own, leaves)
        if own is None or not commit.was_stopped():
            raise error
        return commit.resumed(error, None)

    def ready(self, entry: Entry, values: Values, leaves: list[Leaf]) -> Any:
        """The recording relies on state that has changed, so it tells nothing about what the body does."""
        return MISS
