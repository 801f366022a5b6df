"""The CUDA engine: records a body as a CUDA graph in the tree's private pool.

Recording runs nothing on the device. The graph's first replay is what makes the recorded call happen; where recording
fails nothing has happened yet, but for the body's Python, which is undone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from attrs import evolve

from capture.core import config
from capture.core.interrupts import is_interrupt, let_through
from capture.engines.base import (
    NOTHING_KNOWN,
    Block,
    Input,
    LiftedNumbers,
    Number,
    NumbersToLift,
    Recorded,
    Recording,
    StateTensors,
)
from capture.engines.cuda import kernel_params
from capture.engines.cuda.capture_graph import Capture, RefusedError, unbroken
from capture.engines.cuda.copy_in import InputCopies
from capture.engines.cuda.driver import is_reached_from_c, node_counter
from capture.engines.cuda.memory_recorder import MemoryRecorder
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.recorder import GraphRecorder
from capture.engines.cuda.replay import CudaRecording
from capture.engines.cuda.segment_run import SegmentRun
from capture.engines.cuda.segments import SegmentedGraphs
from capture.engines.cuda.verifying_recorder import VerifyingRecorder
from capture.engines.staging import Staging, stage
from capture.native import native
from capture.observe import source_location
from capture.observe.collectives import finish_kept
from capture.observe.described import DescribedRun, ImplicitInput, KeptLeaf
from capture.observe.expectation import Expectation
from capture.observe.facts_builder import describe
from capture.observe.run import ObservedRun, run_watched
from capture.observe.trace import External
from capture.state.call import Call
from capture.torch_private import cuda
from capture.torch_private.capabilities import generator_id
from capture.torch_private.distributed import replicas_among
from capture.torch_private.generators import default_generator

__all__ = ["CudaBackend", "CudaPool"]


class CudaBackend:
    """Implements ``capture.engines.base.Backend`` for one device."""

    has_own_memory = True
    executes_recording_runs = False
    rebinds_to_pool = False
    owns_in_place = False
    breaks_at_reads = True
    runs_islands = True
    lifts_numbers = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)

    @property
    def rebinds_tensors(self) -> bool:
        """Whether the driver can be asked. Found out at the first use, as it takes an import."""
        return kernel_params.missing() is None

    def lift(
        self, one: Recording, other: Recording, numbers: NumbersToLift
    ) -> LiftedNumbers | str:  # fmt: skip
        """Numbers set in the parameters of kernels: see ``lifting``."""
        del one
        assert isinstance(other, CudaRecording)
        return other.lift(numbers)

    def lift_like(
        self, known: LiftedNumbers, other: Recording, given: Sequence[Number]
    ) -> str:  # fmt: skip
        """Not told: kernels of another size may be others, with parameters in other places."""
        del known, other, given
        return "parameters of kernels of another size are not told"

    def memory_bytes(self) -> int:
        """Bytes of the device's memory."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def new_pool(self) -> CudaPool:
        """An empty pool."""
        return CudaPool(self.device)

    in_capture = staticmethod(cuda.is_capturing)
    """The current stream is being captured by somebody, or nobody can as this is the child of a fork."""

    def capture_look(self) -> Callable[[], bool]:
        """The same, where the driver can be asked."""
        if not is_reached_from_c():
            return self.in_capture
        look: Callable[[], bool] = native.CaptureLook(
            slow=self.in_capture, stream_of=cuda.raw_stream, device=cuda.current_device
        )
        return look

    def record(
        self, pool: CudaPool, call: Call, inputs: Sequence[Input], *, undo: bool = False,
        state: StateTensors = NOTHING_KNOWN, generators: Sequence[torch.Generator] = (),
        expected: Expectation | None = None, may_break: bool = False, schedule: bool = False,
    ) -> Recorded:  # fmt: skip
        """Capture the body once. Nothing has happened until the graph is replayed; with ``undo`` it is not."""
        options = (undo, state, generators, expected, may_break, schedule)
        return unbroken(pool, self._record, (pool, call, inputs, *options))

    def _record(
        self, pool: CudaPool, call: Call, inputs: Sequence[Input], undo: bool, state: StateTensors,
        generators: Sequence[torch.Generator], expected: Expectation | None, may_break: bool, schedule: bool,
    ) -> Recorded:  # fmt: skip
        begin = time.perf_counter()
        opened = pool.open()
        create = (time.perf_counter() - begin) * 1e3
        pool.find(0)  # refreshes the list of segments, before anything asks while capturing
        here = (self.device, torch.device("cuda"))  # a generator of "cuda" is one of the device current at its making
        mine = [generator for generator in generators if generator.device in here]
        capture = Capture(pool, mine)
        generators_known = {generator_id(generator) for generator in (*mine, default_generator(self.device))}
        follows = expected is not None and not state.moving and not schedule and self._may_verify(pool, call)
        run = SegmentRun(pool, capture, call) if self._may_break(pool, call, may_break=may_break) else None
        kind = functools.partial(MemoryRecorder, room=config.current().schedule_room) if schedule else GraphRecorder
        recorder = (
            VerifyingRecorder(pool, expected) if expected and follows else kind(pool, generators_known, state, run)
        )
        recorder.differentiates = torch.is_grad_enabled() and not call.keeps_program
        staging, watched, failure = self._run(pool, capture, recorder, call, inputs, run)
        failure = failure or _failure(capture, recorder, watched)
        if isinstance(recorder, VerifyingRecorder) and recorder.difference is not None:
            pool.abandon()
            return _unlike(recorder, watched)
        if failure is not None or watched is None or watched.error is not None:
            failure = failure or "the capture failed"
            pool.abandon()
            stopped = watched is not None and isinstance(watched.error, RefusedError)
            transient = _may_go_away(watched, failure)
            return Recorded(watched, None, None, failure, executed=False, stopped=stopped, transient=transient)
        for storage in staging.storages():
            pool.give_back(storage)
        staging.leave_uncounted(watched.uncounted_arguments())
        if isinstance(recorder, VerifyingRecorder):
            return self._followed(pool, capture, recorder, staging, watched, inputs, undo=undo)
        described = describe(watched)
        if run is not None and run.has_begun:
            run.settle_last()
            mutated = {placeholder.path for placeholder in described.facts.placeholders if placeholder.mutation}
            staging.copy_back_only({at for at, (path, _) in enumerate(watched.call.paths()) if path in mutated})
        staging.lend(recorder.trace.lent)
        if not pool.shared:
            described.facts = evolve(described.facts, separate_pools=torch.cuda.get_allocator_backend())
        if recorder.unseen:
            self._beware(recorder, watched, described, staging)
        recorded = self._recorded(pool, capture, recorder, staging, watched, described, inputs, undo=undo, run=run)
        return evolve(recorded, parts=(("create", create, 0), *recorded.parts)) if opened else recorded

    def _run(
        self, pool: CudaPool, capture: Capture, recorder: GraphRecorder, call: Call, inputs: Sequence[Input],
        run: SegmentRun | None,
    ) -> tuple[Staging, ObservedRun | None, str | None]:  # fmt: skip
        """The run of the body in a capture, on buffers for its inputs; or why it was not reached. What stops it once it
        may have begun is raised: a failure alone would leave what the body did."""
        staging, watched, is_begun = Staging(), None, False
        try:
            with capture.running():
                staged = [input_ for input_ in inputs if self._is_here(call.leaves[input_.position])]
                staging = stage(pool, call, staged)
                if run is not None:
                    run.staging = staging
                is_begun = True
                watched = run_watched(call, recorder, call.substitute(staging.replacements))
                finish_kept([watched.result, *[change.after for change in watched.changed]])
                staging.end_run()
        except RuntimeError as error:
            if (is_begun and watched is None) or is_interrupt(error):
                raise
            when = "before" if watched is None else "after"
            return staging, watched, f"{type(error).__name__} {when} the body ran: {error}".partition("\n")[0]
        return staging, watched, None

    def _may_verify(self, pool: CudaPool, call: Call) -> bool:
        strided = all(self._is_here(leaf) and leaf.layout is torch.strided for leaf in call.leaves)
        return strided and pool.shared and node_counter(pool.stream) is not None

    def _followed(
        self, pool: CudaPool, capture: Capture, recorder: VerifyingRecorder, staging: Staging, watched: ObservedRun,
        inputs: Sequence[Input], *, undo: bool,
    ) -> Recorded:  # fmt: skip
        """A run that was the same again, as far as operators and memory tell."""
        described = recorder.confirm(watched)
        if described is None:
            pool.abandon()
            return _unlike(recorder, watched)
        staging.lend(recorder.trace.lent)
        recorded = self._recorded(pool, capture, recorder, staging, watched, described, inputs, undo=undo)
        if recorded.recording is not None or recorded.transient:
            return evolve(recorded, followed="yes")
        recorder.difference = recorded.failure
        return _unlike(recorder, watched)

    def _may_break(self, pool: CudaPool, call: Call, *, may_break: bool) -> bool:
        """Whether generators that are arguments are lent to a graph as a whole."""
        return may_break and pool.shared and not any(isinstance(leaf, torch.Generator) for leaf in call.leaves)

    def _is_here(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device == self.device

    def _beware(self, recorder: GraphRecorder, watched: ObservedRun, described: DescribedRun, staging: Staging) -> None:
        """Kernels of unknown memory may read all state that the body can reach, and write any argument: note that in
        the facts."""
        storages = {id(implicit.external.storage) for implicit in described.implicit} | recorder.arguments
        for key, owners in watched.before.tensors.items():
            source, tensor = owners[0]
            if key not in storages and tensor.device == self.device and tensor.numel():
                same = tuple(owner for owner in owners if owner[1] is tensor)
                external = External(tensor, tensor.untyped_storage(), None)
                described.guarded.append(ImplicitInput(source.path, same, external))
        staging.lend(set(map(id, staging.storages())))
        described.facts = evolve(described.facts, unseen=tuple(dict.fromkeys(recorder.unseen)))

    def _recorded(
        self, pool: CudaPool, capture: Capture, recorder: GraphRecorder, staging: Staging, watched: ObservedRun,
        described: DescribedRun, inputs: Sequence[Input], *, undo: bool, run: SegmentRun | None = None,
    ) -> Recorded:  # fmt: skip
        kept = [*described.outputs, *(leaf for effect in described.effects for leaf in effect.leaves)]
        failure = _unresolved(kept, recorder)
        fresh = [leaf.value.untyped_storage() for leaf in kept if leaf.kind == "fresh"]
        storages = {id(storage): storage for storage in fresh if storage.nbytes() and storage.device == self.device}
        layout = pool.close_recording(list(storages.values())) if failure is None else None
        if layout is None:
            failure = failure or "a tensor that the body made is kept where nobody is known to keep it"
            pool.abandon()
            return Recorded(watched, described, None, failure, executed=False)
        copies, constants = InputCopies(staging, recorder.device_copies()), recorder.constants()
        begins = frozenset(storage.data_ptr() for storage in storages.values())
        make: Callable[..., CudaRecording] = CudaRecording
        if run is not None and run.has_begun:
            make = functools.partial(SegmentedGraphs, run=run, trunk=run.trunk(recorder.trace))
        elif isinstance(recorder, MemoryRecorder) and pool.shared:
            make = functools.partial(CudaRecording, notes=recorder.notes())
        recording = make(
            pool, capture, copies, constants, tuple(inputs), draws=recorder.draws, kept=begins,
            written=recorder.state_tensors.written,
        )  # fmt: skip
        try:
            begin = time.perf_counter()
            recording.prepare(
                watched, described, {input_.position for input_ in inputs if input_.how == "static"}, counted=not undo
            )
            instantiate = (time.perf_counter() - begin) * 1e3
        except RuntimeError as error:
            let_through(error)
            failure = f"{type(error).__name__} while instantiating: {error}".partition("\n")[0]
            return Recorded(
                watched, described, None, failure, executed=False, transient=isinstance(error, torch.OutOfMemoryError)
            )
        blocks = tuple(_block(leaf) for leaf in kept)
        return Recorded(
            watched, described, recording, None, blocks, executed=False, layout=layout,
            parts=(("instantiate", instantiate, recording.graph_bytes),),
        )  # fmt: skip


_ON_A_STREAM = "`with torch.cuda.stream(torch.cuda.Stream()):`"
_KEPT = (
    "; autograd runs the node of a leaf on the stream of its first use, as long as anything keeps the node, and before"
    " torch 2.13 no capture takes the default stream: "
)
_KEPT_BY_REPLICA = f"DistributedDataParallel keeps those of its parameters: make it in {_ON_A_STREAM}"
_KEPT_BY_LOSSES = f"drop the losses of earlier eager steps, or run those in {_ON_A_STREAM}"
_KEPT_OUTSIDE = f"; capture that code, too, or run it in {_ON_A_STREAM}"


def _is_of_stream(error: BaseException | None) -> bool:
    """Whether the capture reached work that belongs to the default stream. It would in the next call, too."""
    return error is not None and "legacy stream" in str(error)


def _may_go_away(watched: ObservedRun | None, failure: str) -> bool:
    """Whether another run may get further: the body raised by itself, or memory was short."""
    error = None if watched is None else watched.error
    raised = error is not None and not isinstance(error, RefusedError) and not _is_of_stream(error)
    return raised or "OutOfMemoryError" in failure


def _kept_node(error: BaseException, watched: ObservedRun) -> str:
    """Which node of autograd brought a capture there, as far as that is known, and what helps."""
    told: str | None = next(iter(getattr(error, "__notes__", ())), None)
    if told is not None:  # of a region
        return f"; {told}{_KEPT_OUTSIDE}"
    if not watched.watch.trace.gradients:
        return ""
    return _KEPT + (_KEPT_BY_REPLICA if replicas_among(watched.before.modules) else _KEPT_BY_LOSSES)


def _failure(capture: Capture, recorder: GraphRecorder, watched: ObservedRun | None) -> str | None:
    error = watched.error if watched is not None else None
    if isinstance(error, RefusedError):
        return str(error)
    if error is not None:
        where = source_location.of_error(error)
        text = f"the body raised {type(error).__name__} while capturing: {error}".partition("\n")[0]
        if _is_of_stream(error) and watched is not None:
            text += _kept_node(error, watched)
        return f"{text} ({where})" if where is not None else text
    return capture.error or recorder.unexplained()


def _unlike(recorder: VerifyingRecorder, watched: ObservedRun | None) -> Recorded:
    """What was recorded is not what was expected."""
    followed: Literal["unsuited", "differs"] = "differs" if recorder.is_suited else "unsuited"
    parted = recorder.parted if recorder.is_suited else None
    return Recorded(watched, None, None, recorder.difference, executed=False, followed=followed, parted=parted)


def _block(leaf: KeptLeaf) -> Block | None:
    if leaf.kind != "fresh" or not leaf.value.numel():
        return None
    storage = leaf.value.untyped_storage()
    return Block(storage.data_ptr(), storage.nbytes())


def _unresolved(kept: Sequence[KeptLeaf], recorder: GraphRecorder) -> str | None:
    for leaf in kept:
        if isinstance(leaf.value, torch.Tensor) and leaf.kind == "fresh" and recorder.is_copy(leaf.value):
            return f"{leaf.path} lies on a tensor that is another one in every call"
        if leaf.kind == "foreign" or (leaf.kind == "fresh" and leaf.value.numel() and not recorder.made(leaf.value)):
            return f"{leaf.path} was made outside the pool"
        if leaf.kind == "fresh" and leaf.value.device != recorder.device and leaf.value.numel():
            return f"{leaf.path} is a tensor on {leaf.value.device} that the body made"
    return None
