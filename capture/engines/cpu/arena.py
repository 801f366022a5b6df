"""The CPU engine's pool. Anonymous memory with best-fit allocation, checkpoint and restore.

A recording writes to fixed addresses. So the memory of its outputs and intermediate results must not be given to
others, as torch's own allocator would do once a tensor is freed. The arena hands out blocks while a body is
recorded and knows which are taken; ``restore`` makes exactly the blocks of live outputs taken, so that the next
recording may use all the rest.

Invariant: a block is taken as long as the storage handed out over it lives; a weak reference frees it. Storages keep
their segment mapped, so that an output outlives the arena that made it: a tensor on unmapped memory would end the
process. Blocks are aligned as torch's allocator aligns, since kernels sum in another order on another alignment, and
a replay would differ from eager in the last bit.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.core.interrupts import let_through
from capture.engines.base import Address, Block, Geometry, views_of
from capture.engines.staging import ALIGNMENT
from capture.native import native

_strided = torch.Tensor.as_strided_  # torch's own, also while a body is watched
_SEGMENT = 1 << 27  # bytes; untouched pages cost nothing, and blocks of two segments never merge
_POISON = 0xFF  # NaN in every float format, -1 in every signed integer


class _BlockWatch(weakref.ref[torch.UntypedStorage]):
    """Watches the storage that was handed out over a block."""

    __slots__ = ("block",)
    block: Block


class ArenaSegment:
    """One mapping. ``used`` is the high-water mark in bytes."""

    def __init__(self, nbytes: int) -> None:
        # Private: a forked child must not write into its parent's recordings.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self.memory = mmap.mmap(-1, nbytes, **private)
        with torch.inference_mode(False):  # so that it can be poisoned in any mode
            self.whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.begin: Address = self.whole.data_ptr()
        self.end: Address = self.begin + nbytes
        self.used = 0


class Arena:
    """Implements ``capture.engines.base.Pool``."""

    free_between_recordings = False

    def __init__(self) -> None:
        self._segments: list[ArenaSegment] = []
        self.ranges = native.AddressRanges([])
        """Where the segments are, for the C module, too."""
        self._free: list[tuple[Address, int]] = []  # sorted by address, neighbours merged
        self._taken: dict[Address, tuple[Block, weakref.ref[torch.UntypedStorage]]] = {}
        self._died: list[_BlockWatch] = []
        """Watches of storages that died. Storages die at any time, by garbage collection or in another thread; their
        blocks are given back when the recording thread asks for memory."""

    def allocate(self, nbytes: int) -> Block:
        """A free block of ``nbytes``, in the tightest fit there is. It is taken once ``track`` is called."""
        self._settle()
        nbytes = nbytes or ALIGNMENT
        size = _rounded(nbytes)
        fits = [(length, at) for at, (_, length) in enumerate(self._free) if length >= size]
        if not fits:
            self._grow(size)
            return self.allocate(nbytes)
        length, at = min(fits)
        address = self._free[at][0]
        if length > size:
            self._free[at] = address + size, length - size
        else:
            del self._free[at]
        segment = self._segment(address)
        segment.used = max(segment.used, address + size - segment.begin)
        return Block(address, nbytes)

    def make_room(self) -> bool:
        """False: nothing keeps memory from the arena."""
        return False

    def _grow(self, size: int) -> None:
        segment = ArenaSegment(max(_SEGMENT, -(-size // _SEGMENT) * _SEGMENT, self.reserved_bytes()))
        self._segments.append(segment)
        spans = sorted((segment.begin, segment.end) for segment in self._segments)
        self.ranges = native.AddressRanges([bound for span in spans for bound in span])
        bisect.insort(self._free, (segment.begin, segment.end - segment.begin))

    def _segment(self, address: Address) -> ArenaSegment:
        for segment in self._segments:
            if segment.begin <= address < segment.end:
                return segment
        raise KeyError(address)

    def take(self, nbytes: int) -> tuple[Block, torch.UntypedStorage]:
        """A block and a storage over it, which keeps it taken."""
        block = self.allocate(nbytes)
        storage = self.storage(block)
        self.track(block, storage)
        return block, storage

    def track(self, block: Block, storage: torch.UntypedStorage) -> None:
        """The block is taken until the storage dies."""
        # a callback in C: an exception of a signal handler inside a Python callback would be lost
        reference = _BlockWatch(storage, self._died.append)
        reference.block = block
        self._taken[block.address] = (block, reference)

    def _settle(self) -> None:
        while self._died:
            reference = self._died[-1]
            block = reference.block
            taken = self._taken.get(block.address)
            if taken is not None and taken[1] is reference:
                self._release(block)
                del self._taken[block.address]
            self._died.remove(reference)

    def _release(self, block: Block) -> None:
        begin, length = block.address, _rounded(block.nbytes)
        index = bisect.bisect(self._free, (begin, 0))
        if (
            index < len(self._free)
            and self._free[index][0] == begin + length
            and not self._starts_segment(begin + length)
        ):
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == begin and not self._starts_segment(begin):
            begin, before = self._free.pop(index - 1)
            length += before
            index -= 1
        self._free.insert(index, (begin, length))

    def _starts_segment(self, address: Address) -> bool:
        return any(segment.begin == address for segment in self._segments)

    def live_blocks(self) -> set[Block]:
        """The blocks that are taken now."""
        self._settle()
        return {block for block, _ in self._taken.values()}

    def find(self, address: Address) -> bool:
        """Whether the address lies in one of the segments."""
        is_inside: bool = self.ranges.holds(address)
        return is_inside

    def reserved_bytes(self) -> int:
        """Sum of the segments' high-water marks."""
        return sum(segment.used for segment in self._segments)

    def snapshot(self) -> list[dict[str, Any]]:
        """The segments as ``torch.cuda.memory._snapshot`` tells those of a GPU."""
        live = sorted(self.live_blocks(), key=lambda block: block.address)
        segments = []
        for segment in self._segments:
            blocks, end = [], segment.begin
            for block in (
                block_of_storage for block_of_storage in live if segment.begin <= block_of_storage.address < segment.end
            ):
                if block.address > end:
                    blocks.append(_snapshot_block(end, block.address - end, 0, "inactive"))
                blocks.append(_snapshot_block(block.address, _rounded(block.nbytes), block.nbytes, "active_allocated"))
                end = block.address + _rounded(block.nbytes)
            if end < segment.end:
                blocks.append(_snapshot_block(end, segment.end - end, 0, "inactive"))
            taken = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
            segments.append({
                "address": segment.begin, "total_size": segment.end - segment.begin, "stream": 0, "device": 0,
                "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
                "allocated_size": taken, "active_size": taken, "blocks": blocks,
                "requested_size": sum(block["requested_size"] for block in blocks),
            })  # fmt: skip
        return segments

    def overlay(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Another storage over a caller's memory."""
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def storage(self, block: Block) -> torch.UntypedStorage:
        """A fresh storage over a block."""
        segment = self._segment(block.address)
        offset = block.address - segment.begin
        return torch.frombuffer(segment.memory, dtype=torch.uint8, count=block.nbytes, offset=offset).untyped_storage()

    def tensor(self, block: Block, geometry: Geometry) -> torch.Tensor:
        """A fresh tensor on a fresh storage; no view of anything, so that in-place use is as free as in eager."""
        segment = self._segment(block.address)
        dtype = geometry.dtype
        tensor = torch.frombuffer(
            segment.memory, dtype=dtype, count=block.nbytes // dtype.itemsize, offset=block.address - segment.begin
        )
        tensor = _strided(
            tensor, geometry.shape, geometry.stride, geometry.offset
        ).data  # ``as_strided_`` counts as a write, the alias starts at 0
        return tensor.conj() if geometry.conj else tensor

    def builder(self, block: Block, geometry: Geometry) -> Callable[[], torch.Tensor]:
        """``tensor`` with everything looked up beforehand: 0.5 us a call through an array made once, else 1.9 us."""
        if geometry.conj:
            return functools.partial(self.tensor, block, geometry)
        segment = self._segment(block.address)
        memory, offset = segment.memory, block.address - segment.begin
        dtype, shape, stride, first = geometry.dtype, geometry.shape, geometry.stride, geometry.offset
        array = _array(segment.memory, offset, geometry)
        if array is not None and array.nbytes == block.nbytes:  # its storage has the block's size
            return functools.partial(torch.from_numpy, array)
        count = block.nbytes // dtype.itemsize
        frombuffer = torch.frombuffer
        return lambda: frombuffer(memory, dtype=dtype, count=count, offset=offset).as_strided_(shape, stride, first)

    def views(self, block: Block, geometries: Sequence[Geometry]) -> list[torch.Tensor]:
        """Fresh tensors on one fresh storage that share a version counter, as views of each other do in eager."""
        first = self.tensor(block, geometries[0])
        return [first, *views_of(first, geometries[1:])]

    def device_guard(self) -> None:
        """No device has to be chosen."""

    def is_tidy(self) -> bool:
        """Always True: weak references free every block."""
        return True

    def before_eager(self) -> None:
        """There are no streams."""

    def keep_for(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Storages keep their segment mapped."""

    def can_restore(self, layout: object, live: Sequence[Block]) -> bool:
        """Always True: any block can be taken."""
        del layout, live
        return True

    def restore(self, layout: object, live: Sequence[tuple[Block, torch.UntypedStorage]]) -> None:
        """Forget all blocks, then take these."""
        del layout
        self._taken.clear()
        self._free = sorted((segment.begin, segment.end - segment.begin) for segment in self._segments)
        for block, storage in {block.address: (block, storage) for block, storage in live}.values():
            self._take(block)
            self.track(block, storage)

    def _take(self, block: Block) -> None:
        index = bisect.bisect(self._free, (block.address, 1 << 62)) - 1
        begin, length = self._free.pop(index)
        end = block.address + _rounded(block.nbytes)
        if begin + length > end:
            self._free.insert(index, (end, begin + length - end))
        if block.address > begin:
            self._free.insert(index, (begin, block.address - begin))

    def poison(self, live: Sequence[Block]) -> None:
        """Fill the used part of every segment, but for the blocks in ``live``."""
        kept = sorted((block.address, block.nbytes) for block in live)
        for segment in self._segments:
            position = segment.begin
            for address, nbytes in kept:
                if segment.begin <= address < segment.end:
                    segment.whole[position - segment.begin : address - segment.begin] = _POISON
                    position = address + nbytes
            segment.whole[position - segment.begin : segment.used] = _POISON

    def enter(self) -> None:
        """There are no streams."""

    def used(self) -> list[tuple[Block, torch.UntypedStorage]]:
        """Blocks whose storages are alive."""
        found = [(block, reference()) for block, reference in self._taken.values()]
        return [(block, storage) for block, storage in found if storage is not None]


def _snapshot_block(address: Address, nbytes: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": nbytes, "requested_size": requested, "state": state, "frames": []}


def _rounded(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _array(memory: mmap.mmap, offset: int, geometry: Geometry) -> Any:
    """A NumPy array over the memory of a tensor, which torch turns into a tensor with its sizes in one step.

    None where NumPy, which torch can do without, is missing, has no such type, or where the tensor has an offset.
    """
    try:
        import numpy as np

        name = str(geometry.dtype).removeprefix("torch.")
        strides = [step * geometry.dtype.itemsize for step in geometry.stride]
        array = np.ndarray(geometry.shape, getattr(np, name), memory, offset, strides)
        exact = torch.from_numpy(array)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        let_through(error)
        return None
    same = exact.dtype == geometry.dtype and tuple(exact.stride()) == geometry.stride
    return array if same and geometry.offset == 0 else None
