"""Outputs that are owned: what a graph wrote is copied into memory of the allocator's after each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from capture.engines.base import Geometry, OwnedOutput, Pool, on_storage
from capture.key.tensor_meta import is_dense
from capture.torch_private import capabilities


class OutputCopies:
    """Copies of outputs: one operator for a dense storage; else storage by storage, at 24 us each."""

    def __init__(self, pool: Pool, outputs: Sequence[OwnedOutput]) -> None:
        self._guard = pool.device_guard
        self._dense: list[tuple[OwnedOutput, Callable[[], torch.Tensor]]] = []
        self._sources: list[torch.Tensor] = []
        self._others: list[tuple[OwnedOutput, list[torch.Tensor]]] = []
        for output in outputs:
            with torch.inference_mode(False):
                tensors = pool.views(output.block, output.geometries)
            if len(tensors) > 1 or not _is_plain(output.geometries[0]):
                self._others.append((output, tensors))
                continue
            (like,) = tensors
            form = like.device.type, tuple(like.shape), like.stride(), like.dtype
            self._dense.append((output, capabilities.empty_maker(*form)))
            self._sources.append(like)

    def __call__(self) -> None:
        """Make the copies, and put them into their places."""
        guard = self._guard() if self._dense else None
        with torch.no_grad():
            if guard is None:
                self._copy()
                return
            with guard:
                self._copy()

    def _copy(self) -> None:
        targets = [make() for _, make in self._dense]
        if targets:
            capabilities.copy_all(targets, self._sources)
        for (output, _), target in zip(self._dense, targets, strict=True):
            output.places[output.number] = target.data  # with a version counter that has seen no write, as eager's
        for output, tensors in self._others:
            made = on_storage(tensors[0].untyped_storage().clone(), tensors)
            output.places[output.number] = made if len(made) > 1 else made[0]


def _is_plain(geometry: Geometry) -> bool:
    return not geometry.conj and not geometry.offset and is_dense(geometry.shape, geometry.stride)
