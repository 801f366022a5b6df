"""A recorder that notes for each operator which nodes it added to the graph, and which memory it read and wrote.

What it notes is numbers: addresses as they are in this capture, which are those that the graph has. Nothing is kept
alive. A recording of which this is known can be scheduled (``scheduling``).
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from attrs import field
from typing_extensions import override

from capture.core.data import define
from capture.engines.cuda.recorder import GraphRecorder
from capture.key.tensor_meta import nbytes_of, span_bytes
from capture.observe.operator_schema import Operator, OperatorTraits, looked_up, tensors_in, tensors_out, written
from capture.schedule.accesses import Lifetime, OperatorMemory
from capture.schedule.dependencies import Span

_KEEPS_STATE = ("_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn")
"""Operators that write tensors which their schemas do not name, beside those in ``operator_schema``; and persistent
kernels, whose blocks wait for each other."""


@define(eq=False)
class MemoryNotes:
    """What one capture's operators did."""

    operators: list[OperatorMemory] = field(factory=list)
    lifetimes: list[Lifetime] = field(factory=list)
    unsuited: str | None = None
    """Why no order but the recorded one can be trusted."""


class _Life(weakref.ref[torch.UntypedStorage]):
    """The life of a piece of the pool's memory that an operator allocated."""

    __slots__ = ("begin", "born", "died", "end", "key")
    key: int
    begin: int
    end: int
    born: int
    died: int | None


class MemoryRecorder(GraphRecorder):
    """A ``GraphRecorder`` that makes ``MemoryNotes``, and has operators use memory again late.

    What one operator wrote where another one's result lay has to wait for all that read that. So memory of the body is
    not given back at once: the last ``room`` bytes of it are held until more dies. The pool gets larger by as much.
    """

    def __init__(self, *args: Any, room: int) -> None:
        super().__init__(*args)
        self._room = room
        self._held: deque[tuple[torch.UntypedStorage, int]] = deque()
        self._held_bytes = 0
        self._operators: list[OperatorMemory] = []
        self._lives: dict[int, _Life] = {}
        """By ``id`` of the storage."""
        self._gone: list[_Life] = []
        self._dying: list[_Life] = []  # appended to in C: storages die in the middle of anything
        self._unsuited: str | None = None

    @override
    def forget_operator(self) -> None:
        super().forget_operator()
        self._held.clear()

    def notes(self) -> MemoryNotes:
        """The notes of the run that is over."""
        self._note_deaths()
        lives = [Lifetime(one.begin, one.end, one.born, one.died) for one in (*self._gone, *self._lives.values())]
        unsuited = self._unsuited
        if unsuited is None and (self.state_tensors.moving or self.device_copies()):
            unsuited = "tensors are copied to the device before every replay"
        return MemoryNotes(self._operators, lives, unsuited)

    @override
    def note_resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self._unsuited = "the body gives a storage other memory"
        super().note_resized(storage, nbytes)

    @override
    def execute(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note_deaths()
        first, taken = self._count() if self._count is not None else 0, self._taken()
        result = super().execute(op, args, kwargs)
        end = self._nodes
        if looked_up(op)[0].metadata == "storage":
            self._unsuited = "the body gives a storage other memory"
        fresh = self._note_lives(
            tensors_out(result), {id(tensor.untyped_storage()) for tensor in tensors_in(args, kwargs)}
        )
        if first < end:
            hidden = max(self._taken() - taken - fresh, 0)
            self._operators.append(self._memory_of(looked_up(op)[0], (first, end), args, kwargs, result, hidden))
        return result

    def _memory_of(
        self, op: OperatorTraits, nodes: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
        hidden: int,
    ) -> OperatorMemory:  # fmt: skip
        arguments, made = tensors_in(args, kwargs), tensors_out(result)
        if _is_unknown(op) or any(not self._is_plain(tensor) for tensor in (*arguments, *made)):
            return OperatorMemory(op.name, *nodes, is_barrier=True)
        writes = {_span_of(tensor) for tensor, _ in written(op, args, kwargs)}
        inputs = {id(argument.untyped_storage()) for argument in arguments}
        for tensor in made:
            storage = tensor.untyped_storage()
            whole = storage.data_ptr(), storage.data_ptr() + nbytes_of(storage)
            writes.add(_span_of(tensor) if id(storage) in inputs else whole)
        reads = {_span_of(argument) for argument in arguments} - writes
        return OperatorMemory(op.name, *nodes, tuple(sorted(reads)), tuple(sorted(writes)), hidden=hidden)

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device and tensor.layout is torch.strided and not tensor.is_nested

    def _note_lives(self, made: list[torch.Tensor], argument_storages: set[int]) -> int:
        """Note storages that the operator under way made. Gives how many have memory of this device."""
        self._note_deaths()
        fresh = 0
        for tensor in made:
            if not self._is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            key, nbytes = id(storage), nbytes_of(storage)
            if key in argument_storages or key in self._lives or not nbytes:
                continue
            fresh += 1
            life = self._lives[key] = _Life(storage, self._dying.append)
            life.key, life.begin, life.end = key, storage.data_ptr(), storage.data_ptr() + nbytes
            life.born, life.died = len(self._operators), None
            if nbytes <= self._room:
                self._held.append((storage, nbytes))
                self._held_bytes += nbytes
        while self._held_bytes > self._room:
            self._held_bytes -= self._held.popleft()[1]
        return fresh

    def _note_deaths(self) -> None:
        """The operator that runs now, or the next one, may have their memory."""
        while self._dying:
            life = self._dying.pop()
            life.died = len(self._operators)
            self._gone.append(life)
            if self._lives.get(life.key) is life:
                del self._lives[life.key]

    def _taken(self) -> int:
        """How many blocks the allocator has handed out on this device so far."""
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)
        return int(counts["allocation"]["all"]["allocated"])


def _is_unknown(op: OperatorTraits) -> bool:
    """Whether the operator's schema does not say what memory it touches."""
    return op.foreign or op.opaque or op.collective or op.unsafe or op.base.startswith(_KEEPS_STATE)


def _span_of(tensor: torch.Tensor) -> Span:
    begin = tensor.data_ptr()
    return begin, begin + span_bytes(tensor)
