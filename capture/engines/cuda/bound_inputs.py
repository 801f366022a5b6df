"""Arguments that a graph reads and writes where each call has them.

An argument at which the graph cannot be pointed, because it is aligned otherwise or lies in the pool, is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from capture.engines.base import BoundInput, Geometry
from capture.engines.cuda.address_table import ALIGNMENT, AddressTable
from capture.engines.cuda.pool import CudaPool
from capture.engines.staging import over
from capture.key.tensor_meta import span_bytes


class BoundInputs:
    """Points one graph at this call's arguments before each launch."""

    def __init__(self, pool: CudaPool, bindings: AddressTable, inputs: Sequence[BoundInput]) -> None:
        self._pool, self._bindings, self._inputs = pool, bindings, tuple(inputs)
        self._positions = [input_.position for input_ in inputs]
        self._at: list[int] | None = None
        self._stand_ins: dict[int, torch.Tensor] = {}
        """By position, copies of this call's arguments; the next call frees them, in stream order."""

    @property
    def inputs(self) -> tuple[BoundInput, ...]:
        """The arguments."""
        return self._inputs

    @property
    def is_written(self) -> bool:
        """Whether the graph writes one of them."""
        return any(input_.is_written for input_ in self._inputs)

    def patch(self, leaves: Sequence[Any]) -> None:
        """Patch what moved since the last launch. Raises ``DriverError`` if the driver refuses."""
        at = [leaves[position].data_ptr() for position in self._positions]
        if at != self._at:
            self._move(leaves, at)

    def copy_back(self, leaves: Sequence[Any]) -> None:
        """Copy what the graph wrote into copies to the caller's tensors."""
        for one in self._inputs:
            if one.is_written and one.position in self._stand_ins:
                leaves[one.position].copy_(self._stand_ins[one.position])

    def _move(self, leaves: Sequence[Any], at: list[int]) -> None:
        self._at, self._stand_ins, addresses = None, {}, {}
        for bound, address in zip(self._inputs, at, strict=True):
            begin = self._bindings.begins[bound.path]
            if (address - begin) % ALIGNMENT or self._pool.find(address):
                stand_in = self._stand_ins[bound.position] = _stand_in(leaves[bound.position], begin % ALIGNMENT)
                address = stand_in.data_ptr()
            addresses[bound.path] = address
        self._bindings.bind(addresses)
        if not self._stand_ins:  # else the copies have to be filled again
            self._at = at


def _stand_in(tensor: torch.Tensor, lead: int) -> torch.Tensor:
    """A copy whose address is ``lead`` bytes beyond a multiple of the alignment, with the same strides."""
    memory = torch.empty(span_bytes(tensor) + 2 * ALIGNMENT, dtype=torch.uint8, device=tensor.device)
    offset = (lead - memory.data_ptr()) % ALIGNMENT // tensor.element_size()
    with torch.no_grad():
        return over(memory.untyped_storage(), evolve(Geometry.of(tensor), offset=offset)).copy_(tensor)
