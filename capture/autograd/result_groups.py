"""Which saved tensors belong to which results, where a call gives several that can be differentiated one after another.

Autograd frees what a node saved once a backward pass has run the node, and raises where a second one comes to it. A
region is one node in the caller's graph, so that a pass from one of its results would free what all others need. Two
losses that share no node with saved tensors are often differentiated in turn, as those of an actor and a critic. Then
the tensors are saved by one keeper for each group of nodes that the same results lead to: a pass asks the keepers of
its results, and frees those.

Invariant: a keeper is freed where eager's pass would free a node of its group, and asked where that would ask one.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import field
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from capture.core.data import define, frozen
from capture.core.interrupts import let_through
from capture.torch_private import capabilities
from capture.torch_private.autograd import CLEARS_SAVED, clear_saved, keeps_graph, nodes_above, sequence_number
from capture.torch_private.probe import probe

FREED = "a backward pass comes to tensors that one before it has freed, which has to be called with retain_graph=True"
"""As eager raises it, where results are differentiated one after another."""


@frozen
class Group:
    """``results``: bit by bit, the results that lead to its nodes. ``tensors``: what these saved, by position among the
    tensors of the backward pass."""

    results: int
    tensors: tuple[int, ...]


def groups_of(
    results: Sequence[torch.Tensor], ends: Sequence[Any], saved_by: Callable[[Any], Sequence[int]]
) -> tuple[Group, ...]:
    """The groups of the graph behind these results, up to the nodes ``ends``. Empty where every two results share a
    node with saved tensors: one keeper does then. ``saved_by``: positions of what a node saved; ``LookupError`` if
    nobody knows."""
    bits: dict[Any, int] = {}
    for at, result in enumerate(results):
        for node in nodes_above([result], ends):
            bits[node] = bits.get(node, 0) | 1 << at
    saved: dict[int, set[int]] = {}
    try:
        for node, of_results in bits.items():
            if positions := saved_by(node):
                saved.setdefault(of_results, set()).update(positions)
    except LookupError:
        return ()
    pairs = ((1 << one) | (1 << other) for other in range(len(results)) for one in range(other))
    if all(any(group & pair == pair for group in saved) for pair in pairs):
        return ()
    return tuple(Group(of_results, tuple(sorted(positions))) for of_results, positions in saved.items())


@frozen
class Part:
    """Results that share nodes with no others, by position, and the inputs that they lead to, by position among the
    uses of inputs."""

    results: tuple[int, ...]
    uses: tuple[int, ...]

    def widened(self, values: Sequence[Any], at: Sequence[int], count: int, other: Any = None) -> list[Any]:
        """``count`` values, with these in the places ``at`` and ``other`` in the rest."""
        found = [other] * count
        for position, value in zip(at, values, strict=False):
            found[position] = value
        return found


@define(eq=False)
class _Growing:
    """Results that share nodes, and the numbers of the inputs that they lead to."""

    results: set[int]
    nodes: set[Any]
    reached: set[int]

    def add(self, other: _Growing) -> None:
        self.results |= other.results
        self.nodes |= other.nodes
        self.reached |= other.reached

    def span(self) -> tuple[int, int]:
        """When its nodes were made: autograd runs what was made last first."""
        numbers = [sequence_number(node) for node in self.nodes]
        return min(numbers, default=0), max(numbers, default=0)


def parts_of(results: Sequence[torch.Tensor], inputs: Sequence[GradientEdge], uses: Sequence[int]) -> tuple[Part, ...]:
    """The parts of the graph behind these results, in the order in which they were made. One node in the caller's graph
    leads from each result to all inputs: a pass from one would come to what is above the inputs of another, and raise
    where a pass from that other has freed it. Empty where all results lead to the same inputs, or where a sum of more
    than two gradients would be made in another order: the body went to and fro between parts."""
    numbers = {(edge.node, edge.output_nr): number for number, edge in enumerate(inputs)}
    ends, parts = {edge.node for edge in inputs}, list[_Growing]()
    for at, result in enumerate(results):
        nodes = set(nodes_above([result], ends))
        edges = {(result.grad_fn, result.output_nr), *(edge for node in nodes for edge in node.next_functions)}
        part = _Growing({at}, nodes, {numbers[edge] for edge in edges if edge in numbers})
        for other in [other for other in parts if not other.nodes.isdisjoint(nodes)]:
            parts.remove(other)
            part.add(other)
        parts.append(part)
    if all(part.reached == parts[0].reached for part in parts):
        return ()
    in_order = sorted(((part.span(), min(part.results), part) for part in parts), key=lambda one: one[:2])
    for number in {number for part in parts for number in part.reached if uses.count(number) > 2}:
        spans = [span for span, _, part in in_order if number in part.reached]
        if any(last >= first for (_, last), (first, _) in itertools.pairwise(spans)):
            return ()
    return tuple(
        Part(tuple(sorted(part.results)), tuple(at for at, number in enumerate(uses) if number in part.reached))
        for _, _, part in in_order
    )


class _Keeper(torch.autograd.Function):
    """A node that nothing leads to: autograd checks what it saves for writes, as for any node."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError


_apply = capabilities.function_apply(_Keeper)


@functools.cache
def _anchor() -> torch.Tensor:
    return torch.zeros((), device="cpu", requires_grad=True)


@define(eq=False)
class _Kept:
    """What one call saved of a group. ``inner``: tensors that no user gets, so that nothing has to check them; they
    come first."""

    group: Group
    inner: Sequence[torch.Tensor]
    end: torch.Tensor
    """What the keeper gave: its node lives as long (torch 2.11)."""
    node: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.node = self.end.grad_fn

    def tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """With their positions. Raises what autograd raises where one was freed or written."""
        saved = self.node.saved_tensors
        return zip(self.group.tensors, (*self.inner, *saved), strict=False)  # behind them may be what stands for none

    def let_go(self) -> None:
        """Free it, unless the backward pass under way keeps its graph."""
        if self.inner and not keeps_graph():
            self.inner = ()
        clear_saved(self.node)


@frozen(eq=False)
class Keepers:
    """What one call saved. ``filling``: what stands for tensors that a pass does not need."""

    kept: tuple[_Kept, ...]
    filling: Sequence[Any]

    @classmethod
    def of(
        cls, groups: Sequence[Group], inner: Sequence[torch.Tensor], checked: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor], filling: Sequence[Any],
    ) -> Keepers:  # fmt: skip
        """``inner``, ``checked``: the tensors in their order. A result that is saved, too, would keep its own graph
        alive."""
        own, count = {id(result) for result in results}, len(inner)
        tensors = [*inner, *[tensor.detach() if id(tensor) in own else tensor for tensor in checked]]
        kept = []
        for group in groups:
            of_group = [tensors[at] for at in group.tensors]
            num_inner = bisect.bisect_left(group.tensors, count)
            end = _apply(_anchor(), of_group[num_inner:] or [_anchor()])
            kept.append(_Kept(group, of_group[:num_inner], end))
        return cls(tuple(kept), filling)

    def _of(self, grads: Sequence[Any]) -> Iterator[_Kept]:
        come = sum(1 << at for at, grad in enumerate(grads) if grad is not None)
        return (one for one in self.kept if one.group.results & come)

    def tensors(self, grads: Sequence[Any], *, every: bool) -> Sequence[Any]:
        """Those that a pass needs to which these gradients come. ``every``: those of other results, too, as far as they
        are there, for gradients of a higher order that come to them; a pass that asks for others raises (``FREED``)."""
        found, needed = list(self.filling), list(self._of(grads))
        for one in self.kept if every else needed:
            try:
                tensors = one.tensors()
            except RuntimeError as error:
                let_through(error)
                if one in needed:
                    raise
                continue
            for at, tensor in tensors:
                found[at] = tensor
        return found

    def let_go(self, grads: Sequence[Any]) -> None:
        """Such a pass has run: free what it used."""
        for one in self._of(grads):
            one.let_go()


@probe
def can_keep() -> bool:
    """Whether torch lets a node that nothing leads to save tensors, and free them. Else there are no groups."""
    if not CLEARS_SAVED:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        tensor = torch.zeros(1, device="cpu")
        kept = _Kept(Group(1, (0,)), (), _apply(_anchor(), [tensor]))
    return [(at, one.data_ptr()) for at, one in kept.tensors()] == [(0, tensor.data_ptr())]
