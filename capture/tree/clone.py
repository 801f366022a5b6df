"""Outputs in memory of the allocator's, for what may be used in ways that only the allocator hears of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.engines.base import Block, Geometry, Pool, views_of
from capture.key.tensor_meta import is_dense
from capture.torch_private import capabilities


class Copier:
    """Copies of fresh leaves: with one operator where they lie densely, else storage by storage, which is 24 us each.

    ``groups``: leaves that share a block, and their positions among all leaves.
    """

    def __init__(self, pool: Pool, groups: Sequence[tuple[Block, tuple[int, ...], tuple[Geometry, ...]]]) -> None:
        self._guard = pool.device_guard
        self._dense: list[tuple[int, Callable[[], torch.Tensor]]] = []
        self._sources: list[torch.Tensor] = []
        self._others: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []
        for block, positions, geometries in groups:
            tensors = pool.views(block, geometries)
            if len(tensors) > 1 or not _is_plain(geometries[0]):
                self._others.append((positions, tensors))
                continue
            (like,) = tensors
            self._dense.append((positions[0], capabilities.empty_like_maker(like)))
            self._sources.append(like)

    def copy_into(self, values: list[Any]) -> None:
        """Put them where they are among all leaves."""
        guard = self._guard() if self._dense else None
        if guard is None:
            self._copy_into(values)
            return
        with guard:
            self._copy_into(values)

    def _copy_into(self, values: list[Any]) -> None:
        targets = []
        for position, make in self._dense:
            values[position] = target = make()
            targets.append(target)
        if targets:
            capabilities.copy_all(targets, self._sources)
        for positions, tensors in self._others:
            made = on_storage(tensors[0].untyped_storage().clone(), tensors)
            for position, tensor in zip(positions, made, strict=True):
                values[position] = tensor


def _is_plain(geometry: Geometry) -> bool:
    return not geometry.conj and not geometry.offset and is_dense(geometry.shape, geometry.stride)


def on_storage(storage: torch.UntypedStorage, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these on another storage, sharing a version counter."""
    one = like[0]
    first = torch.empty(0, dtype=one.dtype, device=one.device)
    first = first.set_(storage, one.storage_offset(), one.shape, one.stride())
    others = views_of(first, [Geometry.of(other) for other in like[1:]])
    return [first.conj() if one.is_conj() else first, *others]
