"""Leaves: tensors at which autograd graphs end, lent to a body as if no graph did.

Autograd keeps one node for each leaf as long as any graph ends there, and runs it on the stream that was current when
it was made: that of some eager call, which a capture must not touch, as the default stream cannot be captured. For the
length of a run such a leaf is another tensor on the same memory, with the same version counter, in the same Python
object: its node is as old as the run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator

import torch

from capture._gradients import references_to, refuses
from capture._host_reads import gradient_of
from capture._torch_private import leaf_like, swap_tensors, use_count
from capture._torch_private_distributed import groups_exist

Lent = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors that were lent and whose they are, by ``id``."""


@contextlib.contextmanager
def lent(tensors: Iterable[torch.Tensor]) -> Iterator[Lent]:
    """Exchange these; other threads see that, too. A ``grad`` that the block leaves is theirs afterwards."""
    swap = swap_tensors
    if swap is None:
        yield {}
        return
    pairs: Lent = {}
    try:
        for tensor in tensors:
            other = leaf_like(tensor)
            if tensor.is_leaf:
                other.grad = gradient_of(tensor)
            with contextlib.suppress(RuntimeError):  # autocast's cache may know the tensor by a weak reference
                swap(tensor, other)
                pairs[id(other)] = other, tensor
        yield pairs
    finally:
        for other, tensor in pairs.values():
            gradient = gradient_of(tensor)
            swap(tensor, other)
            if tensor.is_leaf and gradient is not gradient_of(tensor):
                tensor.grad = gradient
            other.grad = None  # a graph may keep it, and would keep the gradient


def ends_graphs(tensor: torch.Tensor) -> bool:
    """A leaf at which some graph may end: something in C++ has it."""
    return tensor.requires_grad and use_count(tensor) > 1 and not refuses(tensor) and tensor.is_leaf


def is_unhooked(leaf: torch.Tensor) -> bool:
    """Nobody has a hook at this leaf that a backward pass in a body would have to call.

    A hook on the node needs Python code that keeps the node; ``DistributedDataParallel`` does without, so that nothing
    is sure while a process group exists.
    """
    if groups_exist():
        return False
    hooks = leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
    return not hooks and _references(leaf) <= _nobodys()


@functools.cache
def _nobodys() -> int:
    """References to a node that no Python code keeps: the number differs between versions of torch."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True, device="cpu")
        pending = leaf.clone()
    count = _references(leaf)
    del pending
    return count


def _references(leaf: torch.Tensor) -> int:
    with torch.inference_mode(False), torch.enable_grad():
        node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return sys.getrefcount(node) - references_to(node)
