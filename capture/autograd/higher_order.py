"""Gradients of gradients through a body whose forward pass was cut off.

Eager's graph of a first backward pass with ``create_graph=True`` hangs on the graph of the forward pass: what that one
saved leads back into it. The kept graph (``saved_graph``) can do the same, but it serves many calls, and what hangs on
it could be run only while it has the tensors of its own call. So each order is computed from the beginning inside one
node of the caller's graph: the first pass with a graph of its own, then the gradients of that. The node's inputs are
the body's inputs and the gradients that came in; its own backward pass is the next order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from attrs import evolve
from typing_extensions import override

from capture.autograd import unreached
from capture.core.data import frozen
from capture.torch_private.autograd import is_leaf_node
from capture.torch_private.capabilities import function_apply

Grads = Sequence[torch.Tensor | None]


class Body(Protocol):
    """One call of a body, to compute gradients of."""

    def gradients_of_order(
        self, tensors: Sequence[torch.Tensor], orders: Sequence[Grads], *, keeps_graph: bool, reaches_inputs: bool
    ) -> Sequence[torch.Tensor | None]:
        """Of the tensors that the body saved, and of the gradients that came in, order by order: gradients of the
        body's inputs, then of all those that came in before the last ones. ``keeps_graph``: computed as where the last
        ones get a graph, too. ``reaches_inputs=False``: None for the inputs."""

    def puts_off(self, orders: Sequence[Grads]) -> bool:
        """Whether the first backward pass comes to the body in the present run of autograd, too, and then computes
        gradients of the inputs in one pass through the graph, as eager does."""


@frozen(eq=False)
class Order:
    """The computation of one node."""

    body: Body
    inner: Sequence[torch.Tensor]
    """Tensors that the body saved and nobody else has."""
    num_saved: int
    num_inputs: int
    defined: tuple[tuple[bool, ...], ...]
    """Which gradients are given, order by order; the others are None."""

    def of(
        self, tensors: Sequence[torch.Tensor], come: Sequence[torch.Tensor], *, keeps_graph: bool
    ) -> Sequence[torch.Tensor | None]:
        """``come``: all gradients that are given, in one row."""
        row = iter(come)
        orders = [[next(row) if there else None for there in defined] for defined in self.defined]
        later = not keeps_graph and self.body.puts_off(orders)
        return self.body.gradients_of_order(
            (*self.inner, *tensors), orders, keeps_graph=keeps_graph, reaches_inputs=not later
        )

    def parts(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Saved tensors, inputs, and gradients that are given."""
        begin, end = self.num_saved, self.num_saved + self.num_inputs
        return tensors[:begin], tensors[begin:end], tensors[end:]

    def after(self, grads: Grads) -> Order:
        """The next order, for these gradients."""
        return evolve(self, defined=(*self.defined, tuple(grad is not None for grad in grads)))


class _Node(torch.autograd.Function):
    """The gradients of one order as part of the caller's graph."""

    @staticmethod
    @override
    def forward(ctx: Any, order: Order, *tensors: Any) -> Any:
        ctx.order, ctx.there = order, [tensor is not None for tensor in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[tensor for tensor in tensors if tensor is not None])
        saved, _, come = order.parts(tensors)
        return tuple(order.of(saved, come, keeps_graph=True))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, order = iter(ctx.saved_tensors), ctx.order.after(grads)
        tensors = [next(saved) if there else None for there in ctx.there]
        made = [*[None] * order.num_saved, *apply(order, tensors, [grad for grad in grads if grad is not None])]
        came = [grad is not None for grad, there in zip(made, ctx.there, strict=False) if there]
        unreached.leave_out_hooks(ctx.next_functions, came)
        return (None, *made)


class _Handle(torch.autograd.Function):
    """A tensor without memory of its own that has a place in the graph of another one."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    @override
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_apply, handle = function_apply(_Node), function_apply(_Handle)


def apply(order: Order, tensors: Sequence[Any], come: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """The gradients of an order; as part of a graph where gradients are on."""
    if torch.is_grad_enabled():
        made: Sequence[torch.Tensor | None] = _apply(order, *tensors, *come)
        return made
    saved, _, before = order.parts(tensors)
    return order.of(saved, (*before, *come), keeps_graph=False)


def inputs_of(
    next_functions: Sequence[tuple[Any, int]], sources: Sequence[torch.Tensor | None],
    handles: Mapping[int, torch.Tensor],
) -> list[torch.Tensor | None]:  # fmt: skip
    """Tensors at the same places in the graph as inputs of a node: leaves, ``handles`` by position, or some of
    ``sources``. None for an input that needs no gradients."""
    inputs: list[torch.Tensor | None] = []
    for position, (above, number) in enumerate(next_functions):
        if above is None:
            inputs.append(None)
        elif is_leaf_node(above):
            inputs.append(above.variable)
        elif position in handles:
            inputs.append(handles[position])
        else:
            known = (source for source in sources if source is not None)
            inputs.append(next(source for source in known if source.grad_fn is above and source.output_nr == number))
    return inputs
