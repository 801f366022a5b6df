"""Calibrate: capture a body a second time, with its tensors where they are now, to learn which parameters follow them.

The capture runs nothing and is thrown away. What the body's Python did is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen

from capture._call import Call
from capture._generators import default_generator
from capture._tensors import span_bytes
from capture._torch_private import generator_id
from capture._watched import Watched, run_watched, undo_python
from capture.backends import Input, Move, Refusal
from capture.backends.cuda import params
from capture.backends.cuda.bindings import ALIGNMENT, Bindings
from capture.backends.cuda.graph import Capture, RefusedError
from capture.backends.cuda.inputs import Constant, Twin
from capture.backends.cuda.pool import CudaPool
from capture.backends.cuda.recorder import Recorder
from capture.backends.cuda.words import Places, Span, Unlike, explain
from capture.backends.staging import stage


@frozen(eq=False)
class Made:
    """What a recording was made with, for a second capture of the same."""

    inputs: Sequence[Input]
    moving: frozenset[str]
    """Paths of Python state that is copied before every replay."""
    memory: Sequence[Twin | Constant]
    """Memory of its own outside of the pool, in the order of its making."""
    added: frozenset[int] = frozenset()
    """Handles of nodes that the capture did not make."""
    unread: frozenset[str] = frozenset()
    """Paths of inputs that no operator got: nothing need follow them."""


def learn(
    pool: CudaPool, capture: Capture, bindings: Bindings | None, made: Made, call: Call, moves: Sequence[Move],
    others: Sequence[Move], generators: Sequence[torch.Generator],
) -> Bindings | Refusal:  # fmt: skip
    """Bindings that know all tensors of ``moves``, or why there can be none.

    ``others``: the other tensors that are read where they are.
    """
    if not pool.shared:
        return Refusal("every recording has a pool of its own under this allocator")
    graph = capture.graph()
    if graph is None:
        return Refusal("the graph is empty")
    try:
        with torch.cuda.device(pool.device):
            bindings = bindings or Bindings(graph, made.added)
    except params.DriverError as error:
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


def _compare(
    pool: CudaPool, bindings: Bindings, made: Made, call: Call, moves: Sequence[Move],
    generators: Sequence[torch.Generator],
) -> Refusal | None:  # fmt: skip
    here = (pool.device, torch.device("cuda"))
    mine = [one for one in generators if one.device in here]
    capture = Capture(pool, mine, relaxed=False)
    recorder = Recorder(pool, {generator_id(one) for one in (*mine, default_generator(pool.device))}, made.moving)
    watched, failure = None, None
    try:
        with capture.running():
            staging = stage(pool, call, [one for one in made.inputs if _is_here(call.leaves[one.position], pool)])
            watched = run_watched(call, recorder, call.substitute(staging.replacements))
            staging.end_run()
    except RuntimeError as error:
        failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        failure = failure or capture.error or _raised(watched)
        graph = capture.graph()
        if failure is not None or graph is None:
            return Refusal(f"a second capture fails: {failure or 'it is empty'}", lasting=False)
        return _explained(pool, bindings, made, graph, recorder, moves)
    finally:
        if watched is not None:
            undo_python(watched)
            watched.forget()
        pool.abandon()


def _is_here(leaf: Any, pool: CudaPool) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device == pool.device


def _raised(watched: Watched | None) -> str | None:
    error = watched.error if watched is not None else None
    if error is None or isinstance(error, (Exception, RefusedError)):
        return None if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
    raise error  # the user's interrupt


def _explained(
    pool: CudaPool, bindings: Bindings, made: Made, graph: torch.cuda.CUDAGraph, recorder: Recorder,
    moves: Sequence[Move],
) -> Refusal | None:  # fmt: skip
    spans = [
        Span(
            move.path, bindings.begins[move.path], span_bytes(move.tensor), move.tensor.data_ptr(),
            tied=move.was is None,  # arguments: how they share memory is part of the key
        )
        for move in moves
    ]  # fmt: skip
    try:
        with torch.cuda.device(pool.device):
            again = [node.words for node in params.read(graph)]
    except params.DriverError as error:
        return Refusal(f"its parameters cannot be read: {error}")
    ours = _own_memory(pool, made.memory, [*recorder.twins(), *recorder.constants()])
    found = explain([node.words for node in bindings.nodes], again, spans, ours)
    if isinstance(found, Unlike):
        kernel = bindings.nodes[found.node].name() if found.node is not None else None
        return Refusal(found.reason, kernel=kernel)
    bindings.learn(found)
    return None


def _own_memory(
    pool: CudaPool, recorded: Sequence[Twin | Constant], again: Sequence[Twin | Constant]
) -> Callable[[int, int], bool]:
    """Both captures take memory in the pool, and outside of it the same pieces in the same order."""
    spans = []
    for one, other in zip(recorded, again, strict=False):
        before, now = _memory(one), _memory(other)
        spans.append(Span("", before.data_ptr(), before.nbytes(), now.data_ptr()))
    outside = Places(spans)
    pool.find(0)  # look at the memory once

    def ours(old: int, new: int) -> bool:
        if pool.found(old):
            return pool.found(new)
        return any(new - old == span.now - span.begin for span in outside.find(old))

    return ours


def _memory(one: Twin | Constant) -> torch.UntypedStorage:
    return one.storage if isinstance(one, Twin) else one.there.untyped_storage()
