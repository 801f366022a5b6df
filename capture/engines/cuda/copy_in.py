"""How this call's values reach a graph: one batched copy into the staged buffers, and copies of CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve, field

from capture.core.data import define
from capture.engines.base import Geometry
from capture.engines.cuda.pool import CudaPool
from capture.engines.staging import ALIGNMENT, Staging, copy_uncounted, over, put_back
from capture.key.tensor_meta import span_bytes
from capture.native import MOST_VALUES
from capture.torch_private import capabilities


@define(eq=False)
class DeviceCopy:
    """A CPU tensor's bytes on the device, copied there before every replay.

    ``source``: position among the call's leaves, or the path of a tensor in Python state, which is then ``tensor``.
    """

    source: int | str
    tensor: torch.Tensor
    storage: torch.UntypedStorage
    lead: int
    waits: bool = True
    """The copy waits for the device, as the body's own did: the caller may overwrite pinned memory as soon as the call
    returns."""

    @property
    def begin(self) -> int:
        """Bytes from the start of the CPU storage to the first byte that is copied."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The device's view of a CPU tensor on the same storage; None if it reaches beyond the bytes copied."""
        shift = int(tensor.storage_offset()) * tensor.element_size() - self.begin
        if shift < 0 or shift + span_bytes(tensor) > span_bytes(self.tensor):
            return None
        offset = (shift + self.lead) // tensor.element_size()
        geometry = Geometry(
            dtype=tensor.dtype, offset=offset, shape=tuple(tensor.shape), stride=tuple(tensor.stride()),
            conj=tensor.is_conj(),
        )  # fmt: skip
        return over(self.storage, geometry)

    def source_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the tensor that is copied, of which this one is the device's."""
        begin = int(tensor.storage_offset()) * tensor.element_size() - self.lead + self.begin
        geometry = evolve(Geometry.of(tensor), offset=begin // tensor.element_size())
        return over(self.tensor.untyped_storage(), geometry)

    def copy_in(self, tensor: torch.Tensor) -> None:
        """Copy the bytes of this call's tensor. Pageable memory is read before the call returns in any case."""
        nbytes = span_bytes(tensor)
        begin = int(tensor.storage_offset()) * tensor.element_size()
        ours = over(self.storage, _bytes(self.lead, nbytes))
        ours.copy_(over(tensor.untyped_storage(), _bytes(begin, nbytes)), not (self.waits and tensor.is_pinned()))


def make_device_copy(pool: CudaPool, source: int | str, tensor: torch.Tensor) -> DeviceCopy:
    """Device memory for a tensor's bytes, with its address modulo 64.

    Outside of the pool: a body is in the middle when its need shows, and memory that the pool gives then may be written
    by what was captured before.
    """
    lead = tensor.data_ptr() % ALIGNMENT if tensor.numel() else 0
    return DeviceCopy(source, tensor, pool.outside(span_bytes(tensor) + lead), lead)


@define(eq=False)
class DeviceConstant:
    """A CPU tensor that the body made of numbers, and its memory on the device."""

    here: torch.Tensor
    there: torch.Tensor

    def fill(self) -> None:
        """Copy the values over, once."""
        with torch.no_grad():
            self.there.copy_(self.here)


@define(eq=False)
class InputCopies:
    """All copies before and after one graph."""

    staging: Staging
    device_copies: list[DeviceCopy] = field(factory=list)

    def copier(self) -> Callable[[Sequence[Any]], None] | None:
        """Copies this call's values in; None if there is nothing to copy."""
        steps: list[Callable[[Sequence[Any]], None]] = []
        singles = [single for single in self.staging.singles if single.tensor.numel()]
        if len(singles) == 1:
            steps.append(_copy_single(singles[0].tensor, singles[0].position))
        elif singles:
            steps.append(_copy_batch([single.tensor for single in singles], [single.position for single in singles]))
        steps += [group.copier() for group in self.staging.groups]
        steps += [_device_copy(device_copy) for device_copy in self.device_copies]
        return _in_order(steps)

    def plain(self, leaves: Sequence[Any]) -> list[tuple[int, int, int, int]] | None:
        """Position, address of the buffer, source and bytes of every copy, if these copies are all there is to do, and
        each is between memory without gaps on the buffer's device. Else None."""
        singles = [single for single in self.staging.singles if single.tensor.numel()]
        if self.staging.groups or self.device_copies or any(single.back or single.lent for single in singles):
            return None
        there = [leaves[single.position] for single in singles]
        elsewhere = any(leaf.device != single.tensor.device for single, leaf in zip(singles, there, strict=True))
        if elsewhere or len(leaves) > MOST_VALUES or any(leaf.is_conj() or leaf.is_neg() for leaf in there):
            return None
        if any(span_bytes(leaf) != leaf.nbytes for leaf in there):
            return None
        return [
            (single.position, single.tensor.data_ptr(), leaf.data_ptr(), leaf.nbytes)
            for single, leaf in zip(singles, there, strict=True)
        ]

    def returner(self) -> Callable[[Sequence[Any]], None] | None:
        """Copies inputs that the body wrote back to the caller's tensors; None if it wrote none."""
        back = [copied for copied in self.staging.singles if copied.back and copied.tensor.numel()]
        steps = [_copy_back(copied.tensor, copied.position, is_counted=copied.is_counted) for copied in back]
        steps += [group.copy_out for group in self.staging.groups if group.back]
        steps += [
            _copy_back_lent(copied.tensor, copied.position)
            for copied in self.staging.singles
            if copied.lent and copied.tensor.numel()
        ]
        steps += [group.put_back for group in self.staging.groups if group.lent]
        return _in_order(steps)


def _copy_single(target: torch.Tensor, position: int) -> Callable[[Sequence[Any]], None]:
    copy = target.copy_

    def copy_in(leaves: Sequence[Any]) -> None:
        copy(leaves[position])

    return copy_in


def _copy_batch(targets: list[torch.Tensor], positions: list[int]) -> Callable[[Sequence[Any]], None]:
    copy = capabilities.copy_all

    def copy_in(leaves: Sequence[Any]) -> None:
        copy(targets, [leaves[position] for position in positions])

    return copy_in


def _copy_back(source: torch.Tensor, position: int, *, is_counted: bool) -> Callable[[Sequence[Any]], None]:
    copy = torch.Tensor.copy_ if is_counted else copy_uncounted

    def copy_out(leaves: Sequence[Any]) -> None:
        copy(leaves[position], source)

    return copy_out


def _copy_back_lent(source: torch.Tensor, position: int) -> Callable[[Sequence[Any]], None]:
    def give_back(leaves: Sequence[Any]) -> None:
        put_back(leaves[position], source)

    return give_back


def _device_copy(device_copy: DeviceCopy) -> Callable[[Sequence[Any]], None]:
    def copy_in(leaves: Sequence[Any]) -> None:
        device_copy.copy_in(leaves[device_copy.source] if isinstance(device_copy.source, int) else device_copy.tensor)

    return copy_in


def _in_order(steps: list[Callable[[Sequence[Any]], None]]) -> Callable[[Sequence[Any]], None] | None:
    if len(steps) < 2:
        return steps[0] if steps else None

    def all_steps(leaves: Sequence[Any]) -> None:
        for step in steps:
            step(leaves)

    return all_steps


def _bytes(offset: int, nbytes: int) -> Geometry:
    return Geometry(dtype=torch.uint8, offset=offset, shape=(nbytes,), stride=(1,))
