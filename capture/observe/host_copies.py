"""Copies to the host that a body makes of tensors on a device.

Who copies a tensor to the host waits for the device, which no graph can. But as long as the body only returns the copy
or keeps it, nothing in the body follows from its values: the recording keeps the values on the device, and a replay
makes the copy as it hands out its results. Where an operator, an island or Python gets the copy, the wait counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.core.facts import HostSync
from capture.key.tensor_kind import OnHost
from capture.key.tensor_meta import storage_of


@define(eq=False)
class HostCopy:
    """One such tensor."""

    storage: weakref.ref[torch.UntypedStorage]
    form: tuple[Any, ...]
    """Of the copy as a whole, as ``form_of`` tells it."""
    kind: OnHost
    op: str
    sync: tuple[Any, HostSync]
    """The wait for the device that it is where more comes of it, and its key in ``RunTrace.syncs``."""
    there: torch.Tensor | None
    """While it is recorded: the values on the device, which nothing writes afterwards."""
    left: torch.Tensor | None = None
    """The tensor on this memory that was found among what the body left: the copy, or what stands for an array."""

    def is_left_as(self, tensor: torch.Tensor) -> bool:
        """Note that the body left it as this tensor. False where a replay could not: it is a part of the copy, needs
        gradients, or is left in two ways, which share memory."""
        if form_of(tensor) != self.form or (self.left is not None and self.left is not tensor):
            return False
        self.left = tensor
        return True


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells a tensor that is the whole copy from others on its memory."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad


@define(eq=False)
class HostCopies:
    """Those of one run of which nothing came so far."""

    known: dict[int, HostCopy] = field(factory=dict)
    """By ``id`` of the storage on the host."""
    is_next: bool = False
    """The operator that runs makes one."""
    snapshot: torch.Tensor | None = None
    """What a recorder made on the device instead."""

    were_made: bool = False
    """There were some, if only for a while."""

    def note(self, kind: OnHost, op: str, result: torch.Tensor, sync: tuple[Any, HostSync]) -> None:
        """The operator of this name made it."""
        storage, there = result.untyped_storage(), self.snapshot
        self.is_next, self.snapshot, self.were_made = False, None, True
        self.known[id(storage)] = HostCopy(weakref.ref(storage), form_of(result), kind, op, sync, there)

    def of(self, tensor: torch.Tensor) -> HostCopy | None:
        """The copy on whose memory the tensor lies."""
        if not self.known or not tensor.is_cpu:
            return None
        storage = storage_of(tensor)
        found = self.known.get(id(storage))
        return found if found is not None and found.storage() is storage else None

    def used(self, tensors: Iterable[torch.Tensor]) -> Iterator[HostCopy]:
        """Those among the tensors. From now on they are tensors like others."""
        for tensor in tensors:
            if (copy := self.of(tensor)) is not None:
                del self.known[id(storage_of(tensor))]
                yield copy

    def kept(self) -> set[int]:
        """``id`` of the storages on the device from which replays copy. Values of copies that are gone are let go."""
        self.known = {key: copy for key, copy in self.known.items() if copy.storage() is not None}
        there = [copy.there for copy in self.known.values() if copy.left is not None]
        return {id(tensor.untyped_storage()) for tensor in there if tensor is not None}
