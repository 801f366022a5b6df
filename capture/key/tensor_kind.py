"""What a replay needs beside the memory to make a tensor like the one that the body made: its class, whether it
requires gradients, its attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.torch_private.capabilities import unseen
from capture.torch_private.freed_graph import freed_graph, with_freed_graph

PLAIN_TYPES = frozenset({
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, range, slice, type(Ellipsis), type(NotImplemented),
})  # fmt: skip


def refuses(tensor: torch.Tensor) -> bool:
    """Whether it is a view that was made without gradients of a base that was then written with them: autograd raises
    when its graph is looked at."""
    try:
        _ = tensor.grad_fn
    except RuntimeError as error:
        let_through(error)
        return True
    return False


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to no autograd graph."""
    return not refuses(tensor) and tensor.is_leaf


@frozen(eq=False)
class TensorKind:
    """The class of a tensor, whether graphs may begin at it, and the plain values that code put on it: a parameter that
    is a ``DTensor`` has such, too. ``freed``: the name of the tensor's node in a graph that a backward pass freed."""

    kind: type[torch.Tensor]
    requires_grad: bool
    attributes: dict[str, Any]
    freed: str | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind | None:
        """The kind of a tensor; None for a plain tensor, or for a part of a graph."""
        attributes = attributes_of(tensor)
        if (type(tensor) is torch.Tensor and not tensor.requires_grad and not attributes) or not is_leaf(tensor):
            return None
        plain = {name: value for name, value in attributes.items() if type(value) in PLAIN_TYPES}
        return cls(type(tensor), tensor.requires_grad, plain)

    @classmethod
    def of_freed_graph(cls, tensor: torch.Tensor) -> TensorKind | None:
        """None for what is not part of a graph, or of one that a backward pass may still go through."""
        if type(tensor) is not torch.Tensor or is_leaf(tensor) or attributes_of(tensor) or refuses(tensor):
            return None
        freed = None if tensor._is_view() or tensor._backward_hooks else freed_graph(tensor)
        return None if freed is None else cls(torch.Tensor, True, {}, freed)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of this kind already."""
        if self.freed is not None:
            return tensor.grad_fn is not None
        return type(tensor) is self.kind and tensor.requires_grad == self.requires_grad and self._is_put_on(tensor)

    def given_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this kind on the memory of a new plain one, with that one's versions."""
        if self.freed is not None:
            # A replay builds it as a view where another one is first on its memory; no graph goes on from that.
            return with_freed_graph(tensor.detach() if tensor._is_view() else tensor, self.freed)
        if type(tensor) is not self.kind:
            tensor = torch.nn.Parameter(tensor, self.requires_grad)  # the only other class of plain tensors
        elif tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        for name, value in self.attributes.items():
            tensor.__dict__.setdefault(name, value)
        return tensor

    def _is_put_on(self, tensor: torch.Tensor) -> bool:
        return tensor.__dict__.keys() >= self.attributes.keys()


class WithoutGraph:
    """A tensor that gets no graph, on the memory of one that gets one: no view that autograd knows."""

    @staticmethod
    def is_of(tensor: torch.Tensor) -> bool:
        """Always False: nothing on a tensor tells whether autograd knows it as a view."""
        return False

    @staticmethod
    def given_to(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without a graph on the memory of ``tensor``: a detached alias, not a view that autograd follows."""
        return tensor.detach()


ArraySteps = tuple[tuple[str, tuple[Any, ...]], ...]
"""Methods of an array that are called one after the other, each with its arguments."""


@frozen
class AsArray:
    """A tensor that the body handed out as an array on its memory, or what methods of that array made of it."""

    steps: ArraySteps = ()

    @staticmethod
    def is_of(value: Any) -> bool:
        """Whether it is an array already."""
        return not issubclass(type(value), torch.Tensor)

    def given_to(self, tensor: torch.Tensor) -> Any:
        """An array on the memory of the tensor, which keeps that alive."""
        return self.made_of(tensor.detach().numpy())

    def made_of(self, array: Any) -> Any:
        """What the methods make of this array."""
        for name, arguments in self.steps:
            array = getattr(array, name)(*arguments)
        return array


@frozen
class OnHost:
    """A copy on the host of a tensor on a device: what the operator makes with these options."""

    op: Any
    options: dict[str, Any]

    @staticmethod
    def is_of(value: Any) -> bool:
        """Whether it was copied already, and may have become an array since."""
        return not issubclass(type(value), torch.Tensor) or bool(value.is_cpu)

    def given_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy, once all that was launched before has run."""
        with torch.no_grad(), unseen():
            copied: torch.Tensor = self.op(tensor, **self.options)
        return copied


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
Kind = TensorKind | WithoutGraph | AsArray | OnHost


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Attributes that code set on the tensor, without those that Dynamo sets."""
    return {name: value for name, value in tensor.__dict__.items() if not name.startswith("_dynamo_")}


def kept_for_gradients(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """A leaf's gradient, and hooks on it, by the names of its attributes."""
    return ((name, value) for name in ("grad", *_HOOKS) if (value := getattr(tensor, name)) is not None)


def hooks_on(tensor: torch.Tensor) -> list[tuple[str, Mapping[int, Any]]]:
    """Tables of the functions that a backward pass calls for a tensor, by the names of its attributes."""
    return [(name, table) for name in _HOOKS if (table := getattr(tensor, name))]
