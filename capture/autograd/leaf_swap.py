"""Tensors at which autograd graphs end, lent to a body as if no graph did.

Autograd keeps one node for each leaf as long as any graph ends there, and runs it on the stream that was current when
it was made: that of some eager call, which a capture must not touch, as the default stream cannot be captured. For the
length of a run on such a device a leaf is another tensor on the same memory, with the same version counter, in the same
Python object: its node is as old as the run.

Other threads that use the leaf meanwhile would get gradients of the other tensor, or none. So nothing is lent while
other threads may run code of users (``torch_private.threads``): such a call runs eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from capture.observe.probes.host_reads import gradient_of
from capture.torch_private.capabilities import leaf_like, swap_tensors
from capture.torch_private.devices import captures_kernels

Lent = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By ``id``, the tensors that were lent and the tensors that they replace."""


def is_needed(device: torch.device) -> bool:
    """Whether nodes of leaves belong to streams on this device, which captures must not touch."""
    return captures_kernels(device) and swap_tensors is not None


@contextlib.contextmanager
def lent(tensors: Iterable[torch.Tensor], refused: set[int] | None = None) -> Iterator[Lent]:
    """Exchange these tensors for the block; other threads would see that, too. A ``grad`` that is set in the block is
    kept. ``refused`` gets the ``id`` of those that could not be exchanged."""
    swap = swap_tensors
    if swap is None:
        yield {}
        return
    pairs: Lent = {}
    tensors = list(tensors)
    if tensors:
        torch.clear_autocast_cache()  # it has weak references, with which torch exchanges no tensor
    try:
        for tensor in tensors:
            stand_in = leaf_like(tensor)
            if tensor.is_leaf:
                stand_in.grad = gradient_of(tensor)
            try:
                swap(tensor, stand_in)
                pairs[id(stand_in)] = stand_in, tensor
            except RuntimeError:  # a weak reference to the tensor exists
                if refused is not None:
                    refused.add(id(tensor))
        yield pairs
    finally:
        if pairs:
            torch.clear_autocast_cache()  # the body's own has such references, too
        for stand_in, tensor in pairs.values():
            gradient = gradient_of(tensor)
            swap(tensor, stand_in)
            if tensor.is_leaf and gradient is not gradient_of(tensor):
                tensor.grad = gradient
            stand_in.grad = None  # a graph may keep the tensor, and would keep the gradient with it
