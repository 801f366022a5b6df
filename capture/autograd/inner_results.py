"""Results of a body that another of its results is made of, as features are of which a loss is computed.

The caller's graph has one node for the whole body, so no gradient comes from the later result to the place of the
earlier one: ``retain_grad()``, hooks, and ``torch.autograd.grad`` for it would see only what comes from outside. Who
asks for such a gradient is noticed in the backward passes of watched runs, whose graph is the caller's own, and of
recorded ones. Of the latter, the pass in which it is noticed first asks the kept graph, where that result has a node.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from capture.core.data import frozen
from capture.torch_private.autograd import add_prehook, is_end_of_pass, nodes_above


def found(results: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Positions of the results, each with a graph, that another one of them is made of."""
    nodes = {result.grad_fn for result in results}
    if len(nodes) < 2:
        return ()
    behind = {above for node in nodes_above(results) for above, _ in node.next_functions}
    return tuple([at for at, result in enumerate(results) if result.grad_fn in behind])


def watcher(results: Sequence[torch.Tensor], tell: Callable[[], object]) -> Callable[[], None]:
    """A function for a backward pass, which tells where somebody asks for gradients of such results."""
    refs = [weakref.ref(results[at]) for at in found(results)]

    def look() -> None:
        tensors = [ref() for ref in refs]
        if any(tensor is not None and (_is_hooked(tensor) or is_end_of_pass(tensor.grad_fn)) for tensor in tensors):
            tell()

    return look


def _is_hooked(tensor: torch.Tensor) -> bool:
    return tensor.retains_grad or bool(tensor._backward_hooks)


@frozen(eq=False)
class InnerResult:
    """Such a result of one recorded call."""

    position: int
    """Among all results that are part of a graph."""
    edge: GradientEdge
    """Its place in the kept graph."""
    tensor: weakref.ref[torch.Tensor]

    def is_asked_for(self) -> bool:
        """Whether somebody has hooks on it, or retains its gradient."""
        tensor = self.tensor()
        return tensor is not None and _is_hooked(tensor)


@contextlib.contextmanager
def handing_on(results: Sequence[InnerResult], grads: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """In the block the kept graph hands the gradients of these results to what the caller put on them. ``grads``: what
    comes from outside, which autograd has handed to that already."""
    with contextlib.ExitStack() as stack:
        for result in results:
            tensor, come = result.tensor(), grads[result.position]
            if tensor is not None:
                stack.callback(add_prehook(result.edge.node, _hook(result.edge.output_nr, tensor, come)).remove)
        yield


def _hook(number: int, tensor: torch.Tensor, come: torch.Tensor | None) -> Callable[[Any], Any]:
    thread = threading.get_ident()

    def hand_on(grads: Sequence[torch.Tensor | None]) -> Any:
        whole = grads[number]
        if whole is None or threading.get_ident() != thread:
            return None
        if come is None:
            for hook in tuple((tensor._backward_hooks or {}).values()):
                changed = hook(whole)
                whole = whole if changed is None else changed
        if tensor.retains_grad:
            held = tensor.grad
            if held is None or (come is not None and torch.equal(held, come)):
                tensor.grad = whole.clone()
            elif come is None:
                tensor.grad = held + whole
        return (*grads[:number], whole, *grads[number + 1 :])

    return hand_on
