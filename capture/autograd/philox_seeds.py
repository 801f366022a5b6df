"""Seeds of dropout inside attention kernels, which are saved for the backward pass.

Run eagerly, the memory-efficient kernel keeps seed and offset on the host and reads them there; captured, it keeps them
on the device. A backward pass that runs eagerly after a recorded forward pass has to copy them to the host, or it would
read a device's address there. Flash attention and cuDNN's kernels keep theirs on the device. Measured with torch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capture.observe.probes.device_syncs import unnoticed
from capture.observe.run import active_watch
from capture.torch_private.autograd import name_of, nodes_above
from capture.torch_private.capabilities import unseen

_SEEDS = ("_saved_philox_seed", "_saved_philox_offset")


def may_be_seed(tensor: torch.Tensor | None) -> bool:
    """Whether it has the dtype and shape of a seed that a captured kernel left on the device."""
    return tensor is not None and not tensor.dim() and tensor.dtype is torch.int64 and tensor.device.type != "cpu"


def read_seeds(ends: Sequence[torch.Tensor]) -> None:
    """Have autograd unpack all seeds in the graph of these tensors."""
    for node in nodes_above(ends):
        for name in _SEEDS if "EfficientAttention" in name_of(node) else ():
            getattr(node, name, None)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, made so that a watch sees that the body may read it."""
    if tensor.device.type == "cpu":
        return tensor
    with unseen(), unnoticed():
        copy = tensor.cpu()
    watch = active_watch()
    if watch is not None:
        watch.note_made(copy)
    return copy
