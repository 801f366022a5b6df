"""Capture a body a second time, with its tensors where they are now, to learn which parameters of the graph move along.

The capture runs nothing and is thrown away. What the body's Python did is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.engines.base import Input, Move, Refusal, StateTensors
from capture.engines.cuda import kernel_params
from capture.engines.cuda.address_inference import CaptureDifference, RangeIndex, TensorRange, infer_addresses
from capture.engines.cuda.address_table import ALIGNMENT, AddressTable
from capture.engines.cuda.capture_graph import Capture, RefusedError, unbroken
from capture.engines.cuda.copy_in import DeviceConstant, DeviceCopy
from capture.engines.cuda.kernel_params import GraphNode
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.recorder import GraphRecorder
from capture.engines.staging import stage
from capture.key.tensor_meta import span_bytes
from capture.native import native
from capture.observe.run import ObservedRun, run_watched, undo_python
from capture.state.call import Call
from capture.torch_private.capabilities import generator_id
from capture.torch_private.generators import default_generator

Recorder = TypeVar("Recorder", bound=GraphRecorder)


@frozen(eq=False)
class CalibrationSetup:
    """The state that a recording was made with, for a second capture of the same body."""

    inputs: Sequence[Input]
    state: StateTensors
    memory: Sequence[DeviceCopy | DeviceConstant]
    """Memory of its own outside of the pool, in the order of its making."""
    added: frozenset[int] = frozenset()
    """Handles of nodes that the capture did not make."""
    unread: frozenset[str] = frozenset()
    """Paths of inputs that no operator got: no parameter has to follow them."""


def learn_addresses(
    pool: CudaPool, capture: Capture, bindings: AddressTable | None, made: CalibrationSetup, call: Call,
    moves: Sequence[Move], others: Sequence[Move], generators: Sequence[torch.Generator],
    nodes: Sequence[GraphNode] | None = None,
) -> AddressTable | Refusal:  # fmt: skip
    """Bindings that know all tensors of ``moves``, or why there can be none.

    ``others``: the other tensors that are read where they are. ``nodes``: those of the graph, if they were read before.
    """
    if not pool.shared:
        return Refusal("every recording has a pool of its own under this allocator")
    graph = capture.graph()
    if graph is None:
        return Refusal("the graph is empty")
    try:
        with torch.cuda.device(pool.device):
            bindings = bindings or AddressTable(graph, made.added, nodes)
    except kernel_params.DriverError as error:
        return Refusal(f"its parameters cannot be read: {error}")
    for move in (*moves, *others):
        bindings.begins.setdefault(move.path, move.before)
    odd = [move.path for move in moves if (move.tensor.data_ptr() - bindings.begins[move.path]) % ALIGNMENT]
    if odd:
        return Refusal(f"{odd[0]} is aligned otherwise than when it was recorded", lasting=False)
    refusal = _compare(pool, bindings, made, call, [*moves, *others], generators)
    unknown = [move.path for move in moves if not bindings.knows([move.path])] if refusal is None else []
    bindings.leave_alone(path for path in unknown if path in made.unread)
    if not bindings.knows(unknown):
        paths = tuple(path for path in unknown if path not in made.unread)
        refusal = Refusal("no parameter of a kernel holds its address", paths=paths)
    return refusal or bindings


def capture_again(
    pool: CudaPool, made: CalibrationSetup, call: Call, generators: Sequence[torch.Generator],
    recorder_of: Callable[[set[int]], Recorder], read: Callable[[torch.cuda.CUDAGraph, Recorder], Refusal | None],
) -> Refusal | None:  # fmt: skip
    """Have ``read`` look at another capture of the body, which is thrown away. The pool is as at the recording.
    ``recorder_of`` makes the watch, of the generators that are registered."""
    here = (pool.device, torch.device("cuda"))
    mine = [generator for generator in generators if generator.device in here]
    capture = Capture(pool, mine)
    recorder = recorder_of({generator_id(generator) for generator in (*mine, default_generator(pool.device))})
    before, found = call.watched, list[Refusal | None]()

    def captured() -> None:
        with capture.running():
            staging = stage(
                pool, call, [input_ for input_ in made.inputs if _is_here(call.leaves[input_.position], pool)]
            )
            run_watched(call, recorder, call.substitute(staging.replacements))
            staging.end_run()

    def run() -> None:
        failure: str | None = None
        try:
            unbroken(pool, captured, ())
        except RuntimeError as error:
            let_through(error)
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = failure or capture.error or _raised(call.watched if call.watched is not before else None)
        graph = capture.graph()
        if failure is not None or graph is None:
            found.append(Refusal(f"a second capture fails: {failure or 'it is empty'}", lasting=False))
        else:
            found.append(read(graph, recorder))

    def finish(ended: bool) -> Refusal | None:
        watched = call.watched  # also of a run that was stopped before it came back
        if watched is not None and watched is not before:
            undo_python(watched)
            watched.forget()
        pool.abandon()
        return found[0] if ended else None

    made_of: Refusal | None = native.committed(run, (), finish)
    return made_of


def _compare(
    pool: CudaPool, bindings: AddressTable, made: CalibrationSetup, call: Call, moves: Sequence[Move],
    generators: Sequence[torch.Generator],
) -> Refusal | None:  # fmt: skip
    return capture_again(
        pool, made, call, generators, lambda registered: GraphRecorder(pool, registered, made.state),
        lambda graph, recorder: _learn_from(pool, bindings, made, graph, recorder, moves),
    )  # fmt: skip


def _is_here(leaf: Any, pool: CudaPool) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device == pool.device


def _raised(watched: ObservedRun | None) -> str | None:
    error = watched.error if watched is not None else None
    if error is None:
        return None
    if not isinstance(error, RefusedError):
        let_through(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _learn_from(
    pool: CudaPool, bindings: AddressTable, made: CalibrationSetup, graph: torch.cuda.CUDAGraph,
    recorder: GraphRecorder, moves: Sequence[Move],
) -> Refusal | None:  # fmt: skip
    ranges = [
        TensorRange(
            move.path, bindings.begins[move.path], span_bytes(move.tensor), move.tensor.data_ptr(),
            tied=move.was is None,  # arguments: how they share memory is part of the key
        )
        for move in moves
    ]  # fmt: skip
    try:
        with torch.cuda.device(pool.device):
            again = [node.words for node in kernel_params.read(graph)]
    except kernel_params.DriverError as error:
        return Refusal(f"its parameters cannot be read: {error}")
    is_own_memory = _own_memory(pool, made.memory, [*recorder.device_copies(), *recorder.constants()])
    learned = infer_addresses([node.words for node in bindings.nodes], again, ranges, is_own_memory)
    if isinstance(learned, CaptureDifference):
        kernel = bindings.nodes[learned.node].name() if learned.node is not None else None
        return Refusal(learned.reason, kernel=kernel)
    bindings.learn(learned)
    return None


def _own_memory(
    pool: CudaPool, recorded: Sequence[DeviceCopy | DeviceConstant], again: Sequence[DeviceCopy | DeviceConstant]
) -> Callable[[int, int], bool]:
    """Both captures take memory in the pool, and outside of it the same pieces in the same order."""
    ranges = []
    for first_node, second_node in zip(recorded, again, strict=False):
        before, now = _memory(first_node), _memory(second_node)
        ranges.append(TensorRange("", before.data_ptr(), before.nbytes(), now.data_ptr()))
    outside = RangeIndex(ranges)
    pool.find(0)  # refreshes the list of the pool's segments once

    def is_own_memory(old: int, new: int) -> bool:
        if pool.knows(old):
            return pool.knows(new)
        return any(new - old == first_node.now - first_node.begin for first_node in outside.find(old))

    return is_own_memory


def _memory(one: DeviceCopy | DeviceConstant) -> torch.UntypedStorage:
    return one.storage if isinstance(one, DeviceCopy) else one.there.untyped_storage()
