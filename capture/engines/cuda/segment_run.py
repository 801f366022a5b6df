"""The recording run of a body in which the host reads values, or calls islands.

A capture executes nothing, so at a break the graph that was captured so far is launched, then the host reads for real,
and the next capture begins in the same pool. What the launched segments change outside of the pool is kept, so that a
recording that comes to nothing has not happened. The last segment is launched by the first replay.

Tensors that an operator makes at a break, such as those of ``nonzero``, are made anew in each call; the segment after
it has a fixed place for them in the pool, to which they are copied before it is launched. An island runs on the
caller's stream. What it may write, which is all that the body used so far, is kept before it, and dropped where it was
not written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import evolve, field
from typing_extensions import override

from capture.core.data import define, frozen
from capture.engines.base import Block, Geometry
from capture.engines.cuda.capture_graph import Capture, RefusedError
from capture.engines.cuda.copy_in import DeviceConstant, DeviceCopy, InputCopies
from capture.engines.cuda.island_break import IslandBreak, Owner
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.streams import in_order
from capture.engines.staging import Staging, over
from capture.engines.undo import LEAST_UNDO, KeptMemory, Undo, most_undo
from capture.key.tensor_meta import span_bytes
from capture.observe.break_notes import IslandBegin
from capture.observe.islands import Outcome, perform
from capture.observe.operator_schema import tensors_in, tensors_out
from capture.observe.trace import External, RunTrace
from capture.state.call import Call
from capture.state.snapshot import Snapshot
from capture.torch_private.capabilities import generator_id

Operate = Callable[[], Any]
Seen = tuple[Any, ...]


@define(eq=False)
class CudaUndo(Undo):
    """Put back in the order of the stream that segments were launched on."""

    pool: CudaPool = field(kw_only=True)

    @override
    def put_back(self) -> None:
        torch.cuda.current_stream(self.pool.device).wait_stream(self.pool.stream)
        with torch.no_grad():
            super().put_back()


@frozen(eq=False)
class GraphBreak:
    """What happens between two graphs."""

    text: str
    operate: Operate
    """The operator, on the recorded memory; nothing where an island runs."""
    places: tuple[torch.Tensor | None, ...]
    """Where the tensors that it makes go; None for one that lies where the operator wrote it."""
    begin: int
    """How many operators ran before it."""
    island: IslandBreak | None = None


@frozen(eq=False)
class Written:
    """What was changed outside of the pool up to the last break."""

    blocks: tuple[Block, ...] = ()
    owners: tuple[Owner, ...] = ()
    """The tensors on these blocks, by owner."""
    generators: tuple[torch.Generator, ...] = ()


class SegmentRun:
    """The segments of one recording run, which are launched as they come."""

    def __init__(self, pool: CudaPool, capture: Capture, call: Call) -> None:
        self._pool, self._capture, self._call = pool, capture, call
        self._before = Snapshot()
        self._arguments: dict[int, int] = {}
        self._generators: Sequence[torch.Generator] = ()
        """The generators that islands may draw from, once there was an island."""
        self._island: IslandBreak | None = None
        """The island that runs now."""
        self.counted: Counter[int] = Counter()
        """How often islands wrote a tensor, by its ``id``: they do so in each replay, and it is counted then."""
        self.staging: Staging | None = None
        """Set once the inputs have their buffers."""
        self.breaks: list[GraphBreak] = []
        self.graphs: list[torch.cuda.CUDAGraph | None] = []
        self.draws: list[bool] = []
        """Whether each segment that was launched draws random numbers."""
        self.seen: list[Seen] = []
        """The memory that each operator got and gave."""
        self.written = Written()
        self._undo = CudaUndo(pool=pool)
        self._copied: list[DeviceCopy] = []
        self._filled: list[DeviceConstant] = []
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of a place in the pool and what is copied there before the next launch."""

    def begin(self, before: Snapshot) -> None:
        """The body is about to run. ``before``: the state it finds."""
        self._before = before
        self._arguments = {id(leaf): at for at, leaf in enumerate(self._call.leaves)}

    # ----------------------------------------------------------------------------------------------------- at a break

    def end_segment(
        self, describe: Callable[[Any], str], operate: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], trace: RunTrace, copies: Sequence[DeviceCopy], constants: Sequence[DeviceConstant], *,
        draws: bool,
    ) -> Any:  # fmt: skip
        """Launch what was captured, run this operator, and go on capturing. Gives its result, with tensors that it made
        in their places in the pool."""
        fixed = self._fixed(args), {name: self._fixed(value) for name, value in kwargs.items()}
        self._pause(trace, copies, constants, draws=draws)
        with torch.no_grad():
            result = operate(*args, **kwargs)
        self._capture.resume()
        input_addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args, kwargs)}
        places: dict[int, torch.Tensor] = {}
        kept: list[torch.Tensor | None] = []
        for out in tensors_out(result):
            fresh = out.untyped_storage().data_ptr() not in input_addresses or not out.numel()
            kept.append(self._place(out, places) if fresh else None)
        begin = len(trace.sequence)
        self.breaks.append(GraphBreak(describe(result), lambda: operate(*fixed[0], **fixed[1]), tuple(kept), begin))
        return _replaced(result, places)

    def _pause(
        self, trace: RunTrace, copies: Sequence[DeviceCopy], constants: Sequence[DeviceConstant], *, draws: bool
    ) -> None:  # fmt: skip
        """Launch what was captured."""
        self._note_written(trace, draws=draws)
        self._capture.pause()
        self.draws.append(draws)
        self.graphs.append(self._capture.graph())
        with torch.no_grad():
            self._launch(copies, constants, self._capture.launcher(), draws=draws)

    # ---------------------------------------------------------------------------------------------------- at an island

    def pause_at_island(
        self, trace: RunTrace, copies: Sequence[DeviceCopy], constants: Sequence[DeviceConstant], *, draws: bool,
        generators: Sequence[torch.Generator],
    ) -> None:  # fmt: skip
        """Launch what was captured, and keep what the island may write, and draw from."""
        self._generators = generators
        self._pause(trace, copies, constants, draws=draws)
        storages = [external.storage for external in self._outside(trace)]
        free, _ = torch.cuda.mem_get_info(self._pool.device)
        if sum(storage.nbytes() for storage in storages) > max(free // 2, LEAST_UNDO):
            raise RefusedError("the body uses more memory before an island than can be kept until it ran")
        with torch.no_grad():
            self._undo.keep(storages, ())

    def run_island(self, begin: IslandBegin, function: Callable[..., Any], args: tuple[Any, ...],
                   kwargs: dict[str, Any], trace: RunTrace, ran: list[Outcome]) -> tuple[Outcome, Any]:  # fmt: skip
        """Run the island, or take its outcome from the run before. What it left goes to the end of ``ran``, whatever
        comes."""
        self._island = IslandBreak(function, torch.is_grad_enabled(), begin.before.places)
        try:
            self._island.take(args, kwargs, begin.before.values, self._is_pools, self._owners)
        except LookupError:
            raise RefusedError(f"{begin.name}() gets a tensor that nobody is known to own") from None
        beside = [owner.get(self._call.leaves) for owner in self._owners_of(self._outside(trace))]
        there = [tensor for owners in self._before.tensors.values() for _, tensor in owners]
        versions = {id(tensor): (tensor, tensor._version) for tensor in there if not tensor.is_inference()}
        count = len(ran)

        def keep_outcome(outcome: Outcome) -> None:
            ran[count:] = [outcome]

        with self._capture.aside():
            outcome, result = perform(
                function, args, kwargs, beside, self.written.generators, begin.before, keep_outcome
            )  # fmt: skip
        keep_outcome(outcome)
        self.counted.update({key: tensor._version - version for key, (tensor, version) in versions.items()})
        return outcome, result

    def resume_after_island(
        self, text: str, outcome: Outcome, trace: RunTrace, given: Sequence[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        """Go on capturing. Gives the island's result with tensors that it made in their places in the pool, and these
        alone. ``given``: the tensors that it got."""
        self._note_written(trace, draws=False)
        self._undo.keep_only({block.address for block in self.written.blocks})
        self._copied.clear()  # what the host has may be other values by now
        self._capture.resume()
        places: dict[int, torch.Tensor] = {}
        kept = [self._place(made, places) for made in outcome.made]
        island, self._island = self._island, None
        assert island is not None
        self.breaks.append(GraphBreak(text, _nothing, tuple(kept), len(trace.sequence) - 1, island))
        self.seen.append(((island.signature(), *map(_metadata, given)), tuple(map(_metadata, places.values()))))
        return outcome.among(given, places), list(places.values())

    def _is_pools(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the pool. Raises ``RefusedError`` for other tensors than replays can give."""
        if tensor.device != self._pool.device or tensor.layout is not torch.strided or tensor.is_neg():
            raise RefusedError("an island gets a tensor of another kind, or on another device")
        is_there = self._pool.find(tensor.untyped_storage().data_ptr())
        if is_there and tensor.requires_grad:
            raise RefusedError("an island gets a tensor that needs gradients")
        return is_there

    def _owners(self, tensor: torch.Tensor) -> list[tuple[Owner, torch.Tensor]]:
        """The caller's tensors on the same memory; where there is none, any that looks like it."""
        if not tensor.numel():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return [(Owner(None, empty), tensor)]
        known = [one for _, one in self._before.owners(tensor.untyped_storage())]
        found = [(self._arguments.get(id(one)), one) for one in known]
        return [(Owner(at, None if at is not None else one), one) for at, one in found]

    def _owners_of(self, externals: Iterable[External]) -> list[Owner]:
        found = [next(iter(self._owners(external.tensor)), None) for external in externals]
        return [one[0] for one in found if one is not None]

    def _outside(self, trace: RunTrace) -> list[External]:
        """The memory that the body used so far and that is not the pool's."""
        externals, pool = [], self._pool
        for external in trace.externals.values():
            storage: Any = external.storage
            if isinstance(storage, torch.UntypedStorage) and storage.device == pool.device:
                begin = storage.data_ptr()
                if begin and (pool.is_output(begin) or not pool.find(begin)):
                    externals.append(external)
        return externals

    # ------------------------------------------------------------------------------------------------ memory in between

    def _place(self, out: torch.Tensor, places: dict[int, torch.Tensor]) -> torch.Tensor:
        """Memory of the pool for what an operator made, in the capture that begins."""
        if out.layout is not torch.strided or out.is_neg() or out.device != self._pool.device:
            raise RefusedError("an operator that waits for the device makes a tensor of another kind")
        block, storage = self._pool.take(span_bytes(out))
        geometry = evolve(Geometry.of(out), offset=0)
        places[id(out)] = over(storage, geometry)
        place = self._pool.tensor(block, geometry)
        self._made.append((place, out))
        return place

    def _fixed(self, value: Any) -> Any:
        """An argument as replays find it: tensors by their addresses alone."""
        if isinstance(value, (list, tuple)):
            return type(value)([self._fixed(member) for member in value])
        if not isinstance(value, torch.Tensor):
            return value
        if value.device != self._pool.device or value.layout is not torch.strided or value.is_neg():
            raise RefusedError("an operator that waits for the device gets a tensor of another kind")
        storage = value.untyped_storage()
        block = Block(storage.data_ptr(), storage.nbytes())
        return self._pool.tensor(block, Geometry.of(value)) if block.nbytes else value.detach()

    def _note_written(self, trace: RunTrace, *, draws: bool) -> None:
        written = [
            external
            for external in self._outside(trace)
            if external.mutation is not None or id(external.storage) in trace.lent
        ]
        blocks = {Block(external.storage.data_ptr(), external.storage.nbytes()) for external in written}
        nbytes = sum(block.nbytes for block in blocks)
        if not self._may_keep(nbytes):
            raise RefusedError(f"{nbytes} bytes are written before the host reads a value, and would have to be kept")
        generators = self._capture.generators() if draws or any(self.draws) else []
        generators = list(
            {generator_id(generator): generator for generator in (*self._generators, *generators)}.values()
        )
        self.written = Written(tuple(blocks), tuple(self._owners_of(written)), tuple(generators))

    def _may_keep(self, nbytes: int) -> bool:
        """Whether so many bytes may be kept: many only where that leaves half of what is free now."""
        if nbytes > most_undo(torch.cuda.get_device_properties(self._pool.device).total_memory):
            return False
        return nbytes <= LEAST_UNDO or nbytes <= torch.cuda.mem_get_info(self._pool.device)[0] // 2

    def _launch(
        self, copies: Sequence[DeviceCopy], constants: Sequence[DeviceConstant], launch: Callable[[], None], *,
        draws: bool,
    ) -> None:  # fmt: skip
        pool, call = self._pool, self._call
        pool.enter()
        call.undo = self._undo
        keep(self._undo, pool, self.written)
        if len(self.graphs) == 1:
            assert self.staging is not None
            copy_in = InputCopies(_uncounted(self.staging)).copier()
            if copy_in is not None:
                copy_in(call.leaves)
        self.fill(copies, constants)
        self.settle()
        if draws:
            in_order(pool.device, launch)
        else:
            launch()

    def fill(self, copies: Sequence[DeviceCopy], constants: Sequence[DeviceConstant]) -> None:
        """Give the device what it reads of the host's memory, as far as that is not done."""
        for device_copy in copies[len(self._copied) :]:
            self._copied.append(device_copy)
            copy_in_late(device_copy, self._call.leaves)
        for constant in constants[len(self._filled) :]:
            self._filled.append(constant)
            constant.fill()

    def settle(self) -> None:
        """Copy what was made at the last break to its place. Nothing is captured now."""
        for place, made in self._made:
            place.copy_(made)
        self._made.clear()

    # ------------------------------------------------------------------------------------------------------ afterwards

    def settle_last(self) -> None:
        """Copy what the last segment needs to its place; the segment is launched later."""
        now = torch.cuda.current_stream(self._pool.device)
        with torch.cuda.stream(self._pool.stream), torch.no_grad():
            self.settle()
        now.wait_stream(self._pool.stream)

    def late(self, copies: Sequence[DeviceCopy]) -> list[DeviceCopy]:
        """The copies that only the last segment needs."""
        return list(copies[len(self._copied) :])

    @property
    def has_begun(self) -> bool:
        """Whether there was a break."""
        return bool(self.breaks)

    def trunk(self, trace: RunTrace) -> list[Seen] | None:
        """All that operators did, so that recordings can be compared. None if that is not known of each."""
        if trace.host_copies.were_made or not len(self.seen) == len(trace.sequence) == len(trace.scalars):
            return None
        return list(zip(trace.sequence, trace.scalars, self.seen, strict=True))


def copy_in_late(device_copy: DeviceCopy, leaves: Sequence[Any]) -> None:
    """Copy a tensor of the host, or one that moves, to the device."""
    source = device_copy.source
    device_copy.copy_in(leaves[source] if isinstance(source, int) else device_copy.tensor)


def seen_by(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Seen:
    """The memory that an operator gets and gives. None of a tensor on the CPU: constants are compared by their
    values."""
    return tuple(map(_metadata, tensors_in(args, kwargs))), tuple(map(_metadata, tensors_out(result)))


def _metadata(tensor: torch.Tensor) -> Seen:
    address = tensor.data_ptr() if tensor.device.type == "cuda" and tensor.layout is torch.strided else 0
    return address, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _replaced(result: Any, places: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return places.get(id(result), result)
    if isinstance(result, (list, tuple)):
        return type(result)([_replaced(member, places) for member in result])
    return result


def keep(
    undo: Undo, pool: CudaPool, written: Written, memory: KeptMemory | None = None,
    owned: Sequence[torch.UntypedStorage] = (),
) -> None:  # fmt: skip
    """Keep what segments change outside of the pool. ``memory``: for that; ``owned``: what has to stay alive for it."""
    use = memory is not None and undo.is_empty
    storages = owned if use else [pool.storage(block) for block in written.blocks]
    undo.keep(storages, written.generators, memory)


def _uncounted(staging: Staging) -> Staging:
    """The same buffers, as tensors whose writes nobody counts as the body's."""
    singles = [
        evolve(single, tensor=over(single.tensor.untyped_storage(), Geometry.of(single.tensor)))
        for single in staging.singles
    ]
    return evolve(staging, singles=singles)


def _nothing() -> None:
    """The operator of a break at which an island runs."""
