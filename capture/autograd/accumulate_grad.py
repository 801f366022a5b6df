"""Gradients that a backward pass itself adds to ``.grad`` of parameters, as autograd's accumulation does.

For ``gradients="accumulate"``. The parameters are then no part of the caller's graph, which saves their nodes in every
pass, and the memory of ``.grad`` stays in place from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from capture.core.errors import CaptureError
from capture.key.pytree import TENSOR_TYPES
from capture.key.tensor_meta import is_dense
from capture.torch_private.autograd import will_execute
from capture.torch_private.capabilities import NO_TASK, graph_task
from capture.torch_private.devices import stream_reader
from capture.torch_private.distributed import groups_exist

Gradients = Sequence[torch.Tensor | None]


class ChosenInputsError(CaptureError, RuntimeError):
    """A backward pass for chosen inputs came through a function whose parameters are no part of the graph."""


class Anchor:
    """A tensor that stands for all parameters in the caller's graph. Only a pass for all leaves runs its node, and the
    caller waits for the stream of that node in the end."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            self.tensor = torch.zeros((), device=device, requires_grad=True)
            self._node = self.tensor.view_as(self.tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.stream_now = stream_reader(device)
        """Gives the handle of the current stream."""
        self._stream = self.stream_now()

    def gradient(self) -> torch.Tensor | None:
        """The gradient to return for it. On another stream it is a tensor, so that autograd makes the two streams
        wait."""
        if self.stream_now() == self._stream:
            return None
        self.tensor.grad = None  # from the last pass
        return torch.zeros_like(self.tensor)

    def check(self) -> None:
        """Raises in a pass for chosen inputs (``torch.autograd.grad``)."""
        assert will_execute is not None
        if not will_execute(self._node):
            raise ChosenInputsError(
                "torch.autograd.grad() and backward(inputs=...) do not reach the parameters of a function captured "
                'with gradients="accumulate". Capture it with gradients="autograd": autograd then has a node for each '
                "parameter in every pass (1 to 3 us of host time a parameter)"
            )


class Order:
    """Whether gradients that the backward passes of one function add to ``.grad`` come in autograd's order.

    Autograd adds up the gradients of all uses of a parameter in a pass, and the sum to ``.grad``. Where one call has
    all uses, its pass does the same. Where several calls use the parameter, other functions, or eager code, each adds
    by itself, and the sum may differ in the last bit. The first passes are looked at, and later ones more and more
    rarely: finding autograd's node of a parameter takes 1 us.
    """

    def __init__(self) -> None:
        self.is_kept = True
        self._task, self._passes = NO_TASK, 0

    def broken_by(self, parameters: Sequence[torch.Tensor]) -> str | None:
        """In a backward pass: another source of gradients for these parameters in the same pass; None if there is
        none."""
        task = graph_task()
        if task == NO_TASK:
            return None
        if task == self._task:
            return "several calls of it"
        self._task, self._passes = task, self._passes + 1
        if self._passes > _LOOKED_AT and self._passes & (self._passes - 1):
            return None
        others = [_latest_users.get(parameter) for parameter in parameters]
        for parameter in parameters:
            _latest_users[parameter] = self, task
        if any(user is not None and user[1] == task and user[0] is not self for user in others):
            return "another captured function"
        assert will_execute is not None
        return "other code" if any(map(will_execute, _ends_of(parameters))) else None


_LOOKED_AT = 4
_latest_users: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By parameter: the function whose pass, among those that were looked at, had it last, and the run of autograd."""


def _ends_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Autograd's nodes that add to ``.grad``: those that a graph has, or else new ones."""
    with torch.enable_grad():
        views = [parameter.view_as(parameter) for parameter in parameters if parameter.requires_grad]
    return [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None]


def may_deposit() -> bool:
    """Whether only ``.grad`` gets the gradients of leaves, as far as is known when a call begins. Data parallelism
    waits for gradients by hooks on autograd's nodes."""
    return will_execute is not None and not groups_exist()


def are_leaves(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether all of them are leaves, which get their ``.grad`` in a backward pass."""
    return all(parameter.is_leaf and type(parameter) in TENSOR_TYPES for parameter in parameters)


def buffers_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
    """The present values of ``.grad``; None if there are hooks, which autograd has to call, or if somebody froze one
    since the forward pass, which then gets none."""
    for one in parameters:
        if one._backward_hooks or one._post_accumulate_grad_hooks or not one.requires_grad:
            return None
    return [parameter.grad for parameter in parameters]


def accumulated(
    parameters: Sequence[torch.Tensor], gradients: Gradients, buffers: Gradients, others: Iterable[Any]
) -> list[Any]:
    """Add each gradient to its buffer, where there is one. Gives the tensors that become ``.grad`` otherwise, each in
    memory that it shares with no other one and with no tensor of ``others``."""
    made: list[Any] = []
    taken = {_memory(value) for value in others if isinstance(value, torch.Tensor) and value.layout is torch.strided}
    with torch.no_grad():
        for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
            if gradient is None or (buffer is not None and _add(gradient, buffer)):
                made.append(None)
            elif buffer is not None:
                made.append(gradient + buffer)
            else:
                made.append(_own(gradient, parameter, taken))
    return made


def put(parameters: Sequence[torch.Tensor], made: Gradients) -> None:
    """Set ``.grad`` where it is a new tensor."""
    for parameter, gradient in zip(parameters, made, strict=True):
        if gradient is not None:
            parameter.grad = gradient


def through_autograd(
    parameters: Sequence[torch.Tensor], gradients: Gradients, *, keeps_graph: bool = False
) -> None:  # fmt: skip
    """Have autograd add the gradients to ``.grad``, so that hooks run. ``keeps_graph``: keep the graph of the
    gradients."""
    pairs = zip(parameters, gradients, strict=True)
    given = [(parameter, grad) for parameter, grad in pairs if grad is not None and parameter.requires_grad]
    with torch.enable_grad():
        ends = [parameter.view_as(parameter) for parameter, _ in given]
    if ends:
        torch.autograd.backward(ends, [grad for _, grad in given], create_graph=keeps_graph)


def _add(gradient: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Add in place. False for a dense gradient and a sparse buffer, whose sum is another tensor."""
    if buffer.is_sparse and not gradient.is_sparse:
        return False
    buffer += gradient
    return True


def _own(gradient: torch.Tensor, parameter: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient as autograd's accumulation stores it: laid out like a dense parameter, else contiguous
    (``torch/csrc/autograd/functions/accumulate_grad.h``)."""
    if gradient.layout is not torch.strided or parameter.layout is not torch.strided:
        return gradient
    dense = is_dense(parameter.shape, parameter.stride())
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    fits = (
        all(size == 1 or stride == own_stride for size, stride, own_stride in pairs)
        if dense
        else gradient.is_contiguous()
    )
    if fits and _memory(gradient) not in taken:
        taken.add(_memory(gradient))
        return gradient
    if not dense:
        return gradient.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)  # fmt: skip


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
