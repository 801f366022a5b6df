"""The private device memory that all recordings of one tree share.

A graph writes to the addresses it was captured with, so two recordings may share memory only if neither needs what
the other writes. The allocator cannot know that: it sees tensors, and a replay makes none. So the tree decides who is
alive, and the pool's allocator is told at the one moment it matters, before a recording: ``restore`` sets its state
back to the layout kept with the node that is followed, in which exactly the blocks of live outputs are taken. The
recording takes what is left, and ``close_recording`` notes the layout for those that follow and gives everything back.

Invariant: outside of recordings every block of the pool is free for the allocator, whatever is alive. Outputs are
tensors that own nothing; a block is freed by nobody but the pool. It prevents the two ways a shared pool goes wrong: a
recording that takes the memory of an output still in use, and memory that nobody can use again as a dead tensor's
storage was never freed. Memory that is taken and that nobody tracks (``is_tidy``) gives the pool up.

Where the allocator cannot put a layout back (``shared`` is False), every recording has a pool of its own.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import evolve

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.engines.base import Address, Block, Geometry, views_of
from capture.engines.cuda.stopped_capture import end_stopped_capture
from capture.engines.cuda.streams import (
    CaptureStream,
    in_order,
    keep_workspaces,
    return_capture_stream,
    take_capture_stream,
    wait_for_streams_on,
)
from capture.engines.staging import over
from capture.native import native, seen
from capture.torch_private import capabilities, cuda
from capture.torch_private.warned import warned

_MUCH = 8 << 20  # bytes from which on memory is given back
_POISON = 0xFF  # NaN in every float format, -1 in every signed integer


def bounds_of(spans: Iterable[tuple[Address, Address]]) -> list[Address]:
    """Where these ranges of addresses begin and end, in turn."""
    bounds: list[Address] = []
    for begin, end in sorted(spans):
        if bounds and begin <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += [begin, end]
    return bounds


@frozen(eq=False)
class PoolLayout:
    """The pool as a recording left it: the allocator's state, and the addresses taken in it."""

    state: Any
    taken: frozenset[Address]


@seen
class CudaPool:
    """Implements ``capture.engines.base.Pool``."""

    __slots__ = (
        "__weakref__", "_anchors", "_capture_stream", "_grew", "_known", "_outputs", "_owned", "_segments", "_taken",
        "beside", "captured", "device", "id", "index", "is_broken", "is_capturing", "ran_on", "ranges", "shared",
    )  # fmt: skip
    free_between_recordings = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._taken = set[Address]()
        self.index = int(device.index)
        self.shared = capabilities.CAPABILITIES.pool_checkpoint
        self._capture_stream: CaptureStream | None = None
        self.id = torch.cuda.graph_pool_handle()
        self._anchors: list[torch.cuda.CUDAGraph] = []
        self._outputs: list[tuple[Address, Address]] = []
        self._segments: list[tuple[Address, Address]] = []
        self._known = native.AddressRanges([])
        """Where the pool was when it was looked at last."""
        self.ranges: Any = None
        """For the C module: the same, unless the pool may have more by now; then it asks ``find``."""
        self._grew = True
        self.is_capturing = False
        self.captured: tuple[torch.cuda.CUDAGraph, Sequence[torch.Generator]] | None = None
        """The graph that is captured, from before the capture begins until it has ended well, and its generators."""
        self._owned: list[torch.UntypedStorage] = []
        """Without a shared pool: what holds the memory of outputs. Freed, it would belong to nobody."""
        self.ran_on: int | None = None
        """Handle of the stream that the last replay ran on."""
        self.beside: set[torch.cuda.Stream] = set()
        """Streams that the caller recorded on outputs (``record_stream``) since the last replay."""
        self.is_broken = False
        """A capture ended in an error of the driver: torch takes no further capture into this pool (2.11)."""

    def __del__(self) -> None:
        if self._taken and not sys.is_finalizing():  # of a recording that was stopped: nobody else would free it
            self._free_taken()
        if self._capture_stream is not None:
            return_capture_stream(self.device, evolve(self._capture_stream, ran_on=self.ran_on))

    @property
    def capture_stream(self) -> CaptureStream:
        """What this pool captures with, taken at the first use: the pool before is gone by then."""
        if self._capture_stream is None:
            self._capture_stream = take_capture_stream(self.device, shared=self.shared)
            self.ran_on = self._capture_stream.ran_on
        return self._capture_stream

    @property
    def stream(self) -> torch.cuda.Stream:
        """Captures run on it."""
        return self.capture_stream.stream

    def open(self) -> bool:
        """Keep the pool alive by an empty graph, also while no recording uses it. True the first time."""
        if self._anchors:
            return False
        self.id = torch.cuda.graph_pool_handle()  # of a pool whose anchor was stopped torch still knows, and takes none
        anchor = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.captured = anchor, ()
            try:
                in_order(self.device, functools.partial(anchor.capture_begin, self.id, "relaxed"))
                warned(torch.cuda.CUDAGraph.capture_end, anchor)  # torch says that it is empty
            except RuntimeError:
                self.stop_capture()
                raise
            self.captured = None
        self._anchors.append(anchor)
        wait_for_streams_on(self)
        if not self.shared:  # a workspace made while capturing would be freed with its graph
            with torch.cuda.stream(self.stream), torch.no_grad(), torch.inference_mode(False):
                square = torch.zeros(8, 8, device=self.device)
                torch.mm(square, square)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return True

    # ---- memory for a recording

    def make_room(self) -> bool:
        """Give memory that eager code left unused back to the device, where that is much: the pool has to take its own
        beside it. True if it was. What watched runs needed would stay in torch's cache for good."""
        pool, held = (
            self.reserved_bytes(),
            torch.cuda.memory_stats_as_nested_dict(self.device),
        )  # making one costs 0.1 ms
        reserved, allocated = (held[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
        if reserved - pool - allocated < _MUCH:
            return False
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # another thread captures
            let_through(error)
            return False
        return True

    def can_restore(self, layout: PoolLayout | None, live: Sequence[Block]) -> bool:
        """Whether these blocks were taken in the layout: no others can be."""
        taken = frozenset[Address]() if layout is None else layout.taken
        return not self.shared or taken.issuperset([block.address for block in live])

    def restore(self, layout: PoolLayout | None, live: Sequence[tuple[Block, torch.UntypedStorage]]) -> None:
        """Take exactly the blocks of ``live``, which were taken in ``layout``; None: the empty pool."""
        if not self.shared:
            self.id = torch.cuda.graph_pool_handle()
            return
        wanted = {block.address for block, _ in live}
        self._outputs = [(block.address, block.address + block.nbytes) for block, _ in live]
        if layout is not None:
            self._taken = set(layout.taken)  # first: a signal's exception may come as soon as torch has done it
            cuda.set_pool_state(self.index, layout.state)
            self._free(layout.taken - wanted)
        self._taken = wanted

    def close_recording(self, kept: Sequence[torch.UntypedStorage]) -> PoolLayout | None:
        """The recording is over: note the layout with its outputs taken, then give every block back.

        None if memory that nobody tracks is still taken: a tensor of the body that was kept somewhere.
        """
        if not self.shared:
            self._owned += kept
            self._segments += [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in kept]
            self._known = native.AddressRanges(bounds_of(self._segments))
            return PoolLayout(None, frozenset())
        taken = frozenset(self._taken | {storage.data_ptr() for storage in kept if storage.nbytes()})
        if not self._holds(taken):
            return None
        try:
            layout = PoolLayout(cuda.pool_state(self.index, self.id), taken)
        except RuntimeError as error:  # a block that waits for another stream is never freed here
            self.is_broken = True
            let_through(error)
            return None
        for storage in kept:
            if storage.nbytes():
                cuda.disown(storage)
        self._free_taken()
        return layout

    def keep_workspaces(self) -> None:
        """Before a capture: what cuBLAS takes while capturing would come from the pool."""
        if self.shared:
            self.enter()  # replays use the same ones
            keep_workspaces(self.capture_stream, self.device)

    def before_eager(self) -> Callable[[], None] | None:
        """Eager code on the stream of captures must not bring workspaces of its own to it: cuBLAS has one for a stream,
        and a capture would take what is freed one day, when somebody has cuBLAS forget all of them."""
        if not self.shared:
            return None
        return functools.partial(_before_eager, weakref.ref(self), self.capture_stream, self.device)

    def give_back(self, storage: torch.UntypedStorage) -> None:
        """A buffer is not used between replays: others may have its memory then."""
        if self.shared:
            cuda.disown(storage)
        else:
            self._owned.append(storage)

    def abandon(self) -> None:
        """A recording came to nothing: give back what was taken for it."""
        self._free_taken()

    def stop_capture(self) -> None:
        """End the capture that something stopped, at whatever point of its begin, run or end, or of this."""
        if self.captured is not None:
            self.is_broken = True
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                end_stopped_capture(*self.captured, self.device, self.id)
            self.captured = None
        self.end_capture()

    def begin_capture(self) -> None:
        """From now on memory may come into the pool at any time."""
        self.is_capturing, self.ranges = True, None

    def end_capture(self) -> None:
        """Nothing is captured any more; the capture may have brought new memory into the pool."""
        self.is_capturing, self._grew, self.ranges = False, True, None

    def _free_taken(self) -> None:
        self._free(tuple(self._taken))

    def _free(self, addresses: Iterable[Address]) -> None:
        """May be stopped between any two: what is no longer noted as taken is not freed again."""
        for address in addresses:
            self._taken.discard(address)
            try:
                cuda.free_block(address)
            except RuntimeError as error:  # torch had not taken it yet
                let_through(error)

    def is_taken(self, address: Address) -> bool:
        """Whether a live output of the path that is recorded below begins here."""
        return address in self._taken

    def parts(self) -> list[tuple[Address, Address]]:
        """Begin and end of all parts of the pool, as they were when it was looked at last."""
        return list(self._segments)

    @property
    def has_outputs(self) -> bool:
        """Whether outputs of the path that is recorded below are alive."""
        return bool(self._outputs)

    def segment_of(self, address: Address) -> tuple[Address, Address]:
        """Begin and end of the part of the pool that an address in it lies in."""
        return next((begin, end) for begin, end in self._segments if begin <= address < end)

    def is_output(self, address: Address) -> bool:
        """Whether the address lies in a live output of the path that is recorded below."""
        return any(begin <= address < end for begin, end in self._outputs)

    def device_guard(self) -> AbstractContextManager[object] | None:
        """Makes the pool's device the current one; None where it is."""
        return None if cuda.current_device() == self.index else torch.cuda.device(self.index)

    def is_tidy(self) -> bool:
        """Whether nothing is taken, as it must be between recordings. What a stopped one took is given back first."""
        if self.is_broken:
            return False
        self._free_taken()
        return not self.shared or not self._anchors or self._holds(frozenset())

    def _holds(self, addresses: frozenset[Address]) -> bool:
        if cuda.pool_holds(self.index, self.id, set(addresses)):
            return True
        gc.collect()  # a reference cycle is no leak: collect it
        return cuda.pool_holds(self.index, self.id, set(addresses))

    def take(self, nbytes: int) -> tuple[Block, torch.UntypedStorage]:
        """Memory for an input, while capturing. No ``torch.empty``: deterministic mode would fill it in the graph."""
        if self.shared:
            storage = torch.UntypedStorage(max(nbytes, 1), device=self.device)
        else:  # memory taken while capturing is used only while the graph runs
            storage = self.outside(nbytes)
        return Block(storage.data_ptr(), storage.nbytes()), storage

    def outside(self, nbytes: int) -> torch.UntypedStorage:
        """Memory that is not the pool's, also while capturing: of a stream that is not captured."""
        with torch.cuda.stream(torch.cuda.default_stream(self.device)):
            return torch.UntypedStorage(max(nbytes, 1), device=self.device)

    # ---- memory as tensors

    def overlay(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Another storage over the memory of a caller's."""
        return self.storage(Block(storage.data_ptr(), storage.nbytes()))

    def storage(self, block: Block) -> torch.UntypedStorage:
        """A fresh storage over a block, which it does not own."""
        return cuda.cuda_storage(block.address, self.device, block.nbytes)

    def tensor(self, block: Block, geometry: Geometry) -> torch.Tensor:
        """A fresh tensor on a fresh storage."""
        return self.builder(block, geometry)()

    def builder(self, block: Block, geometry: Geometry) -> Callable[[], torch.Tensor]:
        """``tensor`` with everything looked up beforehand."""
        make = cuda.cuda_builder(
            block.address, self.device, block.nbytes, geometry.dtype, geometry.shape, geometry.stride, geometry.offset
        )
        return functools.partial(_conjugated, make) if geometry.conj else make

    def views(self, block: Block, geometries: Sequence[Geometry]) -> list[torch.Tensor]:
        """Fresh tensors on one fresh storage that share a version counter."""
        first = self.tensor(block, geometries[0])
        return [first, *views_of(first, geometries[1:])]

    # ---- what lies where

    def find(self, address: Address) -> bool:
        """Whether the address lies in the pool."""
        if self._known.holds(address):
            return True
        return (self._grew or self.is_capturing) and self._refresh_segments() and self.knows(address)

    def knows(self, address: Address) -> bool:
        """Whether the address lies in what the pool had when it was looked at last."""
        is_inside: bool = self._known.holds(address)
        return is_inside

    def _refresh_segments(self) -> bool:
        """Look at the pool's segments again: recordings may have brought new memory. True if there are others now."""
        if not self.shared or not self._anchors or not (self._grew or self.is_capturing):
            return False
        self._grew = False
        segments = [(begin, begin + nbytes) for begin, nbytes in cuda.pool_segments(self.id)]
        is_other = segments != self._segments
        if is_other:
            self._segments, self._known = segments, native.AddressRanges(bounds_of(segments))
        self.ranges = None if self.is_capturing else self._known
        return is_other

    def reserved_bytes(self) -> int:
        """Bytes of the pool's memory; where every recording has its own pool, bytes of their outputs."""
        self._refresh_segments()
        return sum(end - begin for begin, end in self._segments)

    # ---- order and values

    def snapshot(self) -> list[dict[str, Any]]:
        """Always empty: torch's own snapshot has this memory."""
        return []

    def enter(self) -> None:
        """Order the current stream after the stream that the last replay ran on, and after those beside it."""
        now = cuda.raw_stream(self.index)
        while self.beside:
            torch.cuda.current_stream(self.device).wait_stream(self.beside.pop())
        if now == self.ran_on:
            return
        if self.ran_on is not None:
            before = torch.cuda.ExternalStream(self.ran_on, device=self.device)
            torch.cuda.current_stream(self.device).wait_stream(before)
        self.ran_on = now

    def poison(self, live: Sequence[Block]) -> None:
        """Fill everything but these blocks with bytes that read as NaN."""
        if not self.shared or not self._anchors:
            return
        self.enter()
        kept = sorted((block.address, block.address + block.nbytes) for block in live)
        self._refresh_segments()
        for begin, end in self._segments:
            position = begin
            for first, last in kept:
                if begin <= first < end:
                    self._fill(position, first)
                    position = last
            self._fill(position, end)

    def _fill(self, begin: Address, end: Address) -> None:
        if end > begin:
            whole = Geometry(dtype=torch.uint8, offset=0, shape=(end - begin,), stride=(1,))
            with torch.inference_mode(False), torch.no_grad():
                over(cuda.cuda_storage(begin, self.device, end - begin), whole).fill_(_POISON)

    def used(self) -> list[tuple[Block, torch.UntypedStorage]]:
        """Always empty: a run without a recording was only captured, so nothing uses its memory."""
        return []

    def keep_for(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """The pool is given up, but its memory stays until these storages die."""
        for storage in storages:
            weakref.finalize(storage, _let_go, self._anchors, self._owned).atexit = False


def _before_eager(reference: weakref.ref[CudaPool], capture_stream: CaptureStream, device: torch.device) -> None:
    pool = reference()
    if pool is not None:
        pool.enter()  # replays use the same workspaces
    keep_workspaces(capture_stream, device)


def _let_go(*_: object) -> None:
    """The last storage on a pool that was given up has died."""


def _conjugated(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    return make().conj()
