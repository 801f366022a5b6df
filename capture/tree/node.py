"""Node: one recording in the tree, and when it may run again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from capture._events import Log
from capture._fast import native, seen
from capture._liveness import Held
from capture._modules import registrations
from capture._outputs import OutputPlan
from capture.backends import Block, Followed, Pool, Recording

if TYPE_CHECKING:
    from capture._tree import Tree

Pattern = tuple[int | None, ...]
"""Per tensor leaf of a call: its address if it is a live output on the path, else None."""
ChildKey = tuple[int, Pattern]
_numbers = itertools.count(1)
SAMPLED = 16  # calls between two full comparisons of state


@seen
@define(eq=False)
class Node:
    """One recording in the tree. The root has none."""

    parent: Node | None = None
    function: Any = None
    log: Log | None = None
    key: ChildKey = (0, ())
    recording: Recording | None = None
    outputs: OutputPlan | None = None
    check: Callable[[Sequence[Any]], int] = lambda _: 0
    statics: dict[str, torch.Tensor] = field(factory=dict)
    checker: Any = None
    dead_before: tuple[tuple[Node, int], ...] = ()
    dead: frozenset[tuple[int, int]] = frozenset()
    """(node number, group) of all outputs on the path that were dead when this was recorded."""
    number: int = field(factory=lambda: next(_numbers))
    live: list[Held | None] = field(factory=list)
    """The list of ``outputs``: what watches each group handed out last."""
    children: dict[ChildKey, list[Node]] = field(factory=dict)
    followers: dict[int, Node] = field(factory=dict)
    """The child that ran last, by number of its entry."""
    counts: dict[int, int] = field(factory=dict)
    """Recordings below this node, by number of the function."""
    generators: tuple[torch.Generator, ...] = ()
    """Generators the body draws from that are no arguments."""
    written: tuple[int, ...] = ()
    """Positions of managed inputs that the body writes: their tensors' version counters have to move, too."""
    verified: bool = False
    unchecked: int = SAMPLED
    """Replays since the state was compared in full, for ``checks="sampled"``; ``SAMPLED`` asks for a comparison now."""
    registered: int = -1
    """Registrations in modules until then."""
    moved_at: int | None = None
    """Replays that its log counted when gradients it gave were last moved out of the pool."""
    bound: tuple[Followed, ...] = ()
    """Arguments that may be elsewhere in every call, and that the recording does not follow yet."""
    groups: frozenset[str] = frozenset()
    """Names of the process groups that it communicates in."""
    program: Any = None
    """How gradients of this recording's results are computed, if they need any."""
    layout: Any = None
    """The pool as this recording left it."""
    tree: Tree | None = None
    view: Any = None
    """For the C module: what stays as it is from now on."""

    def see(self) -> None:
        """It is in its tree, complete."""
        if native is not None and self.outputs is not None:
            self.view = native.NodeView(
                outputs=self.outputs, source=None if self.written else self.outputs.single,
                several=None if self.written else self.outputs.several(), live=self.live, pattern=self.key[1],
                before=tuple([(node.live, number) for node, number in self.dead_before]),
                tensors=self.outputs.tensors, preserving=self.outputs.preserving,
            )  # fmt: skip

    def replaces(self, parameter: torch.Tensor) -> bool:
        """Every replay gives this tensor another ``grad``, without having read the one before."""
        assert self.outputs is not None
        found = self.outputs.replaced.get(id(parameter))
        return found is not None and found() is parameter

    def drop(self) -> None:
        """Remove this recording and all below it from the tree, now or, from another thread, at its next call."""
        if self.tree is not None:
            self.tree.bury(self)

    def live_groups(self, but: Container[int] = ()) -> Iterator[tuple[int, Block, torch.UntypedStorage]]:
        """Number, block and storage of every output that is still used, without the groups in ``but``."""
        if self.outputs is None:
            return
        for number, (group, held) in enumerate(zip(self.outputs.groups, self.outputs.live, strict=True)):
            storage = held() if held is not None and number not in but else None
            if storage is not None:
                yield number, group.block, storage

    def __attrs_post_init__(self) -> None:
        if self.outputs is not None:
            self.live = self.outputs.live

    def stands(self, pool: Pool, addresses: Sequence[int]) -> bool:
        """These tensors are live outputs of the path, or none, as in the recorded call. The node follows the current
        one, so that the path is the recorded one."""
        find = pool.find
        for address, recorded in zip(addresses, self.key[1], strict=True):
            if address != recorded and (recorded is not None or find(address)):
                return False
        return True

    def state_holds(self, leaves: Sequence[Any]) -> bool:
        """``check`` for ``checks="sampled"``: in full on every ``SAMPLED``th call, and after modules changed."""
        now = registrations()
        if self.unchecked < SAMPLED and self.registered == now:
            self.unchecked += 1
            return True
        facts = self.checker.facts
        if not (facts and facts(*leaves)):
            if self.check(leaves):
                return False
            if facts is not False:
                self.checker.see()
        looks_at_arguments = self.checker.copied or self.checker.arguments
        self.unchecked, self.registered = SAMPLED if looks_at_arguments else 1, now
        return True

    def may_run(self) -> bool:
        """All that was dead when this was recorded is dead now."""
        for node, group in self.dead_before:
            held = node.live[group]
            if held is not None and held() is not None:
                return False
        return True


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(child for children in node.children.values() for child in children)
