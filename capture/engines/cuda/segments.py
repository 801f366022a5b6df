"""A recording with breaks: several graphs, and what the host does between them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from capture.engines.base import BoundInput, Found, IslandCall, Move, NumbersToLift, Refusal, found
from capture.engines.cuda.replay import CudaRecording, Step
from capture.engines.cuda.segment_run import Seen, SegmentRun, copy_in_late, keep
from capture.engines.cuda.streams import in_order
from capture.engines.undo import KeptMemory, Places, Undo, kept_memory
from capture.native import native
from capture.torch_private import cuda


class SegmentedGraphs(CudaRecording):
    """Several graphs and what lies between them."""

    def __init__(self, *args: Any, run: SegmentRun, trunk: list[Seen] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads = tuple(break_.text for break_ in run.breaks)
        self._counted = run.counted
        self._breaks, self._written, self._trunk = run.breaks, run.written, trunk
        self._memory: KeptMemory | None = None
        self._earlier, self._late = run.graphs, run.late(self._input_copies.device_copies)
        self._segment_draws = (*run.draws, self.draws)
        self._segments: list[Step] = []
        self._copy_in: Step | None = None
        self._copy_out: Step | None = None
        staged = self._input_copies.staging
        self._staged = (
            *((single.position, single.block) for single in staged.singles),
            *((tuple(group.members), group.block, group.lead) for group in staged.groups),
        )

    @override
    def _counted_apart(self, tensor: torch.Tensor) -> int:
        return self._counted[id(tensor)]

    @override
    def _add_copies_to_graph(self, leaves: Sequence[Any]) -> None:
        """Add none: the first graph was launched already."""

    @override
    def _make_replay(self) -> Step:
        launches = [*map(_launcher, self._earlier), self._capture.launcher()]
        self._segments = [self._segment(number, launch) for number, launch in enumerate(launches)]
        self._copy_in, self._copy_out = self._input_copies.copier(), self._input_copies.returner()
        return self._finish

    def _finish(self, leaves: Sequence[Any]) -> None:
        """The last segment of the recording run, which makes it a call."""
        self.replay = _in_segments
        self._pool.enter()
        with torch.no_grad():
            for device_copy in self._late:
                copy_in_late(device_copy, leaves)
        self._late = []
        self._segments[-1](leaves)

    def read_in_line(self) -> None:
        """See ``SegmentedRecording``. A signal may come between two graphs."""

    @property
    def kept_places(self) -> Places:
        """See ``SegmentedRecording``."""
        return tuple([(block.address, block.nbytes) for block in self._written.blocks])

    def keep(self, undo: Undo, leaves: Sequence[Any], *, after_one_go: bool = False) -> None:
        """See ``SegmentedRecording``."""
        del after_one_go
        written, pool = self._written, self._pool
        if not (written.blocks or written.generators):
            return
        if self._memory is None:
            self._memory = kept_memory(pool, [pool.storage(block) for block in written.blocks], None)
        keep(undo, pool, written, self._memory, [owner.get(leaves).untyped_storage() for owner in written.owners])

    def put_back(self) -> None:
        """See ``SegmentedRecording``. No replay raises that."""

    def segment(self, number: int) -> Step:
        """See ``SegmentedRecording``."""
        return self._segments[number]

    def _segment(self, number: int, launch: Callable[[], None]) -> Step:
        pool, raw_stream = self._pool, cuda.raw_stream
        index, is_last = pool.index, number == len(self._breaks)
        in_turn = functools.partial(in_order, pool.device) if self._segment_draws[number] else operator.call
        follows_island = number > 0 and self._breaks[number - 1].island is not None
        again = self._input_copies.device_copies if follows_island else []

        def run(leaves: Sequence[Any]) -> None:
            if number == 0:
                if pool.beside or raw_stream(index) != pool.ran_on:
                    pool.enter()
                if self._copy_in is not None:
                    self._copy_in(leaves)
            for device_copy in again:  # the island may have written what the host has
                copy_in_late(device_copy, leaves)
            if is_last:
                in_turn(native.committed, launch, (), lambda ended: self._end(leaves) if ended else None)
            else:
                in_turn(launch)

        return run

    def _end(self, leaves: Sequence[Any]) -> None:
        if self._copy_out is not None:
            with torch.no_grad():
                self._copy_out(leaves)
        if self._version_bumps or self._static_version_bumps:
            self._raise_versions(leaves)

    def meet(self, number: int, leaves: Sequence[Any]) -> Found:
        """See ``SegmentedRecording``."""
        del leaves
        result = self._breaks[number].operate()
        return found(self.reads[number], result)

    def island(self, number: int, leaves: Sequence[Any]) -> IslandCall | None:
        """See ``SegmentedRecording``."""
        island = self._breaks[number].island
        if island is None:
            return None
        beside = [owner.get(leaves) for owner in self._written.owners]
        return island.call(self._pool, leaves, beside, self._written.generators)

    def settle(self, number: int, found: Found) -> None:
        """See ``SegmentedRecording``."""
        for place, made in zip(self._breaks[number].places, found.made, strict=True):
            if place is not None:
                place.copy_(made)

    def note_returned(self, read: Mapping[int, Any]) -> None:
        """See ``SegmentedRecording``. No kernel stops a call."""

    def joins(self, other: SegmentedGraphs, breaks: int, given: Sequence[Mapping[int, str]] = ({}, {})) -> bool:
        """See ``SegmentedRecording``. Copies of the host's tensors lie elsewhere in every recording. Of numbers that a
        replay puts, two recordings have those that they were made with."""
        ours, theirs = self._up_to(breaks), other._up_to(breaks)
        apart = self._input_copies.device_copies or other._input_copies.device_copies
        return ours is not None and not apart and self._staged == other._staged and ours == theirs

    def _up_to(self, breaks: int) -> list[Seen] | None:
        """What happened before the break, and the memory that its operator gets. What it gives is compared by the
        values that were read."""
        if self._trunk is None:
            return None
        end = self._breaks[breaks - 1].begin
        name, scalars, (given, _) = self._trunk[end]
        return [*self._trunk[:end], (name, scalars, given)]

    @property
    @override
    def rebinds_tensors(self) -> bool:
        """False: such a recording is made again when a tensor lies at another address."""
        return False

    @override
    def rebind(self, moves: Sequence[Move]) -> bool:
        """What is copied before every replay is copied from elsewhere."""
        if any(move.tensor.data_ptr() != move.before and not self._is_followed(move) for move in moves):
            return False
        return super().rebind(moves)

    @override
    def _graphs(self) -> Sequence[torch.cuda.CUDAGraph | None]:
        return [*self._earlier, *super()._graphs()]

    @override
    def _learn(self, *args: Any) -> Refusal | None:
        return Refusal("a recording with breaks is made again", lasting=False)

    @override
    def lift(self, numbers: NumbersToLift) -> str:
        return "a recording with breaks is made again"

    @override
    def bind_inputs(self, inputs: Sequence[BoundInput]) -> frozenset[str]:
        return frozenset()

    @override
    def release(self) -> None:
        super().release()
        self._segments, self._earlier, self._breaks, self._memory = [], [], [], None


def _launcher(graph: torch.cuda.CUDAGraph | None) -> Callable[[], None]:
    return _nothing if graph is None else cuda.graph_launcher(graph)


def _nothing() -> None:
    """A segment without kernels."""


def _in_segments(leaves: Sequence[Any]) -> None:
    raise RuntimeError("this recording runs segment by segment, or was released")
