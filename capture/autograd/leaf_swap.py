"""Tensors at which autograd graphs end, lent to a body as if no graph did.

Autograd keeps one node for each leaf as long as any graph ends there, and runs it on the stream that was current when
it was made: that of some eager call, which a capture must not touch, as the default stream cannot be captured. For the
length of a run on such a device a leaf is another tensor on the same memory, with the same version counter, in the same
Python object: its node is as old as the run.

Other threads that use the leaf meanwhile would get gradients of the other tensor, or none. So nothing is lent while
there are other threads (``others_may_see``): such a call runs eagerly.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator

import torch

from capture.observe.probes.host_reads import gradient_of
from capture.torch_private.capabilities import NO_TASK, graph_task, leaf_like, swap_tensors
from capture.torch_private.devices import captures_kernels

Lent = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors that were lent and whose they are, by ``id``."""

_HELPERS = ("multiprocessing.queues", "torch.utils.data._utils.pin_memory", "torch._inductor.", "tqdm.")
"""Modules whose threads run no code of users: they carry batches from and to the workers of a ``DataLoader`` and code
from those of a compiler, or watch a progress bar. Most training programs have such threads."""


def is_needed(device: torch.device) -> bool:
    """Nodes of leaves belong to streams there, which captures must not touch."""
    return captures_kernels(device) and swap_tensors is not None


def others_may_see() -> bool:
    """Another thread may use what is lent. One of autograd's own, in which a checkpointed block runs anew on a device,
    has one beside it that waits for the backward pass."""
    here = threading.current_thread()  # from then on one of C++ is counted
    if threading.active_count() == 1:
        return False
    running = sys._current_frames()
    others = [one for one in threading.enumerate() if one is not here and not _is_helper(one)]
    awake = [one for one in others if not isinstance(one, threading._DummyThread) or one.ident in running]
    is_awaited = isinstance(here, threading._DummyThread) and graph_task() != NO_TASK
    return len(awake) > is_awaited


def _is_helper(thread: threading.Thread) -> bool:
    """By its class, and by what it runs, which ``threading`` keeps as long as it does; else it counts as anybody's. A
    thread of C++ that Python has seen once, such as autograd's, counts while it runs Python."""
    runs = getattr(thread, "_target", None)
    return any(str(getattr(one, "__module__", "")).startswith(_HELPERS) for one in (type(thread), runs))


@contextlib.contextmanager
def lent(tensors: Iterable[torch.Tensor]) -> Iterator[Lent]:
    """Exchange these; other threads would see that, too. A ``grad`` that the block leaves is theirs afterwards."""
    swap = swap_tensors
    if swap is None:
        yield {}
        return
    pairs: Lent = {}
    try:
        for tensor in tensors:
            stand_in = leaf_like(tensor)
            if tensor.is_leaf:
                stand_in.grad = gradient_of(tensor)
            with contextlib.suppress(RuntimeError):  # autocast's cache may know the tensor by a weak reference
                swap(tensor, stand_in)
                pairs[id(stand_in)] = stand_in, tensor
        yield pairs
    finally:
        for stand_in, tensor in pairs.values():
            gradient = gradient_of(tensor)
            swap(tensor, stand_in)
            if tensor.is_leaf and gradient is not gradient_of(tensor):
                tensor.grad = gradient
            stand_in.grad = None  # a graph may keep it, and would keep the gradient
