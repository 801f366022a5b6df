"""Memory that a body allocated without an operator, as compiled functions do.

Such memory is held by nothing but our notes, the result, and what the result's graph has saved.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from attrs import field

from capture.core.data import define
from capture.key.tensor_kind import refuses
from capture.observe import gradient_uses
from capture.observe.trace import External
from capture.state.snapshot import Snapshot
from capture.torch_private.capabilities import has_memory, storage_use_count, use_count


class UnattributedMemory:
    """After a run. ``left``: the tensors that it left."""

    def __init__(self, before: Snapshot, left: Sequence[torch.Tensor]) -> None:
        self._before, self._left = before, left
        strided = [tensor for tensor in left if tensor.layout is torch.strided and has_memory(tensor)]
        self._storages = {id(tensor.untyped_storage()) for tensor in strided}

    def __contains__(self, external: External) -> bool:
        if self._before.owners(external.storage):
            return False
        if id(external.storage) in self._storages:
            return True
        if storage_use_count(external.storage) <= 2 and use_count(external.tensor) <= 1:
            return True
        held = self._saved.get(id(external.storage), _HeldStorage())
        references, uses = _references(held.tensors), list(map(use_count, held.tensors))
        # What autograd saved of a node's own result is unpacked as another tensor each time, which nobody else has.
        holders = 2 + sum(1 if used > 1 else 2 for used in uses)
        if use_count(external.tensor) > 1 or storage_use_count(external.storage) > holders:
            return False
        return all(
            used <= 1 + held.times[id(tensor)] and count <= _SAVED
            for tensor, used, count in zip(held.tensors, uses, references, strict=True)
        )

    @functools.cached_property
    def _saved(self) -> dict[int, _HeldStorage]:
        """What graphs have saved, by ``id`` of the storage."""
        ends = [tensor for tensor in self._left if not refuses(tensor) and tensor.grad_fn is not None]
        storages: dict[int, _HeldStorage] = {}
        for tensor in gradient_uses.saved_above(ends):
            if tensor.layout is torch.strided:
                storages.setdefault(id(tensor.untyped_storage()), _HeldStorage()).add(tensor)
        for held in storages.values():
            for base in [tensor._base for tensor in held.tensors if tensor._base is not None]:
                held.add(base)
        return storages


@define
class _HeldStorage:
    """``tensors`` on one storage, each once; ``times``, by ``id``: how often graphs hold it, or views in graphs do."""

    tensors: list[torch.Tensor] = field(factory=list)
    times: Counter[int] = field(factory=Counter)

    def add(self, tensor: torch.Tensor) -> None:
        """Count one more holder of a tensor on this storage."""
        if id(tensor) not in self.times:
            self.tensors.append(tensor)
        self.times[id(tensor)] += 1


def _references(saved: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(one) for one in saved]


def _probe() -> int:
    with torch.inference_mode(False), torch.enable_grad():
        result = torch.ones(1, device="cpu", requires_grad=True) * torch.ones(1, device="cpu")
    return _references(list(gradient_uses.saved_above([result])))[0]


_SAVED = _probe()
"""References to a tensor in a list, that only a graph has saved, once."""
