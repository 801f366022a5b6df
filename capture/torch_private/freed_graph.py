"""Graphs that a backward pass has freed: what a body leaves that runs its own backward pass and returns the loss.

Autograd still shows such a graph (``requires_grad``, ``grad_fn=<MseLossBackward0>``), and every further backward pass
through it raises. No replay has that graph; it gives its tensors a node with the same name that raises the same. Two
things are asked of torch for that: that what a node saved raises with one certain text once it is freed, and the class
of a node that a Function makes. Where a probe finds them otherwise no graph is taken for a freed one, and what is left
with one keeps the function eager.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from typing_extensions import override

from capture.core.interrupts import let_through
from capture.torch_private.autograd import is_leaf_node


@functools.cache
def _freed_text() -> str | None:
    """What autograd says of something saved that was freed. None where it says nothing."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        made: Any = torch.zeros(1, requires_grad=True).exp().sum()
        made.backward()
        try:
            _ = made.grad_fn.next_functions[0][0]._saved_result
        except RuntimeError as error:
            let_through(error)
            return str(error)
    return None


def _is_freed(node: Any) -> bool:
    """Nothing is unpacked that hooks have packed: they are code of users, or run a block again."""
    users = isinstance(node, torch.autograd.function.BackwardCFunction)
    names = (
        ["_raw_saved_tensors"]
        if users
        else [name_in_node for name_in_node in dir(node) if name_in_node.startswith("_raw_saved_")]
    )
    for name in names:
        try:
            state = getattr(node, name)
            several = state if isinstance(state, tuple) else (state,)
            if any(getattr(saved, "unpack_hook", name) is not None for saved in several):
                return False
            getattr(node, "saved_tensors" if users else name.removeprefix("_raw"))
        except RuntimeError as error:  # else it says that a saved tensor was written
            let_through(error)
            if str(error) == _freed_text():
                return True
    return False


def _is_own(node: Any) -> bool:
    """Whether the node was made by ``with_freed_graph``."""
    return issubclass(getattr(type(node), "_forward_cls", object), _Freed)


def freed_graph(tensor: torch.Tensor) -> str | None:
    """The name of the tensor's node, if each backward pass through it raises before it reaches a leaf or code of users,
    because an earlier one freed what is needed."""
    stack, seen, is_freed = list[Any]([tensor.grad_fn]), set[Any](), False
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_leaf_node(node):
            return None
        if _is_own(node) or _is_freed(node):
            is_freed = True
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            return None
        else:
            stack += [above for above, _ in node.next_functions]
    return type(tensor.grad_fn).__name__ if is_freed and _node_of("Probe") is not None else None


class _Freed(torch.autograd.Function):
    """Puts a tensor where a graph was."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: torch.Tensor, held: tuple[torch.Tensor]) -> torch.Tensor:
        return held[0]

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_freed_text())


@functools.cache
def _node_of(name: str) -> Any:
    """A Function whose nodes are called so."""
    made: Any = type("CapturedGraph", (_Freed,), {})
    node = getattr(made, "_backward_cls", None)
    if node is None:
        return None
    node.__name__ = node.__qualname__ = name
    return made


@functools.cache
def _anchor() -> torch.Tensor:
    """A tensor that needs gradients, for the nodes made here to hang on."""
    return torch.zeros((), device="cpu", requires_grad=True)


def with_freed_graph(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The same tensor, as part of a graph that was freed, below a node of this name."""
    with torch.inference_mode(False), torch.enable_grad():
        made: torch.Tensor = _node_of(name).apply(_anchor(), (tensor,))
    return made


def leave_graph(tensor: torch.Tensor) -> None:
    """Put the tensor below such a node as well, in the place of the freed graph that it ends: the nodes of that one
    keep leaves alive that the body made, and nobody can run them again."""
    node = tensor.grad_fn
    if node is None or _is_own(node) or tensor._is_view() or tensor._backward_hooks or tensor.retains_grad:
        return
    name = freed_graph(tensor)
    if name is not None:
        tensor.detach_()
        with_freed_graph(tensor, name)
