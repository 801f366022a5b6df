"""Gradient offload: gradients that a body drops unread wait on the host while it is recorded.

The caller's gradients stay until a recording has come to something, as a failure must leave them, while the recording
makes the next ones in its pool: without this a whole training step would need their memory twice, for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.key import pytree
from capture.key.pytree import TENSOR_TYPES
from capture.key.tensor_meta import bytes_of
from capture.runtime.entry import Entry
from capture.state import snapshot
from capture.state.call import Call
from capture.tree.liveness import StorageWatch, hold, only_gradients

WORTH = 32 << 20  # bytes; copying to the host and back, where the recording fails, takes 0.2 ms a MiB


@define
class OffloadedGradients:
    """Storages whose memory was given up, each with its values."""

    _kept: list[tuple[StorageWatch, torch.Tensor]] = field(factory=list)
    nbytes: int = 0

    def park(self, storages: list[torch.UntypedStorage]) -> None:
        """Copy to the host and give the memory up."""
        for storage in storages:
            self._kept.append((hold(storage), bytes_of(storage).cpu()))
            self.nbytes += storage.nbytes()
            storage.resize_(0)

    def settle(self) -> None:
        """Give the storages that are still alive their values back."""
        kept, self._kept = self._kept, []
        with torch.no_grad(), torch.inference_mode(False):
            for reference, values in kept:
                storage = reference()
                if storage is not None and not storage.nbytes():
                    storage.resize_(values.numel())
                    bytes_of(storage).copy_(values)


def park(parked: OffloadedGradients, entry: Entry, call: Call) -> None:
    """Park the gradients that the plan replaces without reading them, and that nobody else has."""
    engine, paths = entry.backend, _dropped(entry)
    if engine is None or not engine.has_own_memory or not paths:
        return
    with torch.no_grad(), torch.inference_mode(False):
        storages = _alone(call, paths, torch.device(engine.name))
        if sum(storage.nbytes() for storage in storages) >= WORTH:
            parked.park(storages)


def _dropped(entry: Entry) -> set[str]:
    if entry.facts is None or entry.plan is None:
        return set()
    read = {placeholder.path for placeholder in entry.facts.placeholders}
    names = {effect.path for effect in entry.plan.effects if effect.kind == "tensor" and effect.path.endswith(".grad")}
    return {name for name in names if not any(path == name or path.startswith(f"{name}.") for path in read)}


def _alone(call: Call, paths: set[str], device: torch.device) -> list[torch.UntypedStorage]:
    """Memory on a device of nothing but gradients that one parameter holds, or several that were reduced together."""
    sources = snapshot.snapshot(call.roots()).sources
    holders = [sources[path][0].holder for path in sorted(paths) if path in sources]
    del sources  # it holds the gradients
    users: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for holder in holders:
        for storage in _storages(holder, device):
            users.setdefault(id(storage), (storage, []))[1].append(holder)
    return [storage for storage, several in users.values() if only_gradients(several, storage, 1) is not None]


def _storages(holder: Any, device: torch.device) -> Iterator[torch.UntypedStorage]:
    gradient = holder.grad if isinstance(holder, torch.Tensor) else None
    if gradient is None or gradient.requires_grad:
        return
    for _, leaf in pytree.leaves(gradient):
        if type(leaf) in TENSOR_TYPES and leaf.layout is torch.strided and leaf.device == device:
            storage = leaf.untyped_storage()
            if storage.resizable():
                yield storage
