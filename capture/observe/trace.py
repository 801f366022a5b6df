"""What a watch writes down while a body runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.core.facts import (
    Break,
    CodeLocation,
    Collective,
    Draw,
    GradientUse,
    HostSync,
    HostWork,
    Inlined,
    Island,
    Mutation,
    PackageRunner,
    TensorInfo,
    Unkeyed,
)
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_kind import ArraySteps, AsArray
from capture.key.tensor_meta import digest, nbytes_of
from capture.observe import collectives as _collectives
from capture.observe.host_copies import HostCopies
from capture.observe.operator_schema import TENSORS, OperatorTraits, is_tensor
from capture.observe.returned_value import Kept
from capture.torch_private.distributed import text_of

_INT = {int}
PRINTED = PLAIN_TYPES - {torch.Size}
"""Types whose text is their ``repr``; sizes are opened as tuples."""
Reshaped = tuple[torch.Tensor, torch.UntypedStorage, int, torch.Size, tuple[int, ...]]
"""A tensor, and its storage, offset, shape and strides before it got others."""


@define
class External:
    """Memory that the body used but did not allocate."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    first_use: CodeLocation | None
    mutation: Mutation | None = None


@define
class Produced:
    """Memory an operator of the body made; the reference dies with the memory."""

    storage: weakref.ref[torch.UntypedStorage]
    op: str
    where: CodeLocation | None
    metadata: tuple[Any, ...]

    @classmethod
    def of(cls, storage: torch.UntypedStorage, tensor: torch.Tensor, op: str, where: CodeLocation | None) -> Produced:
        """Note a result; its metadata become text only if they are asked for."""
        shape = () if tensor.is_nested else tensor.shape
        return cls(
            weakref.ref(storage), op, where, (tensor.dtype, shape, tensor.device, tensor.requires_grad, tensor.layout)
        )

    @property
    def info(self) -> TensorInfo:
        """Metadata as plain data."""
        dtype, shape, device, requires_grad, layout = self.metadata
        return TensorInfo(
            dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), stride=(), device=str(device),
            requires_grad=requires_grad, layout=str(layout).removeprefix("torch."),
        )  # fmt: skip


class _Made(weakref.ref[torch.UntypedStorage]):
    """A piece of memory that the body allocated."""

    __slots__ = ("nbytes",)
    nbytes: int


class MemoryInUse:
    """How much memory of one device the body has in use at once."""

    def __init__(self) -> None:
        self._now = self.peak = 0
        self._made: set[_Made] = set()
        self._died: list[_Made] = []  # appended to in C, as storages die at any time

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count memory that the body allocated."""
        while self._died:
            gone = self._died.pop()
            self._made.discard(gone)
            self._now -= gone.nbytes
        reference = _Made(storage, self._died.append)
        reference.nbytes = nbytes_of(storage)
        self._made.add(reference)
        self._now += reference.nbytes
        self.peak = max(self.peak, self._now)


WRITTEN: ArraySteps = (("", ()),)
"""In the place of what is made of an array: its memory was written since."""


@frozen(eq=False)
class HandedOut:
    """An array that code made of a tensor's memory, of whose values nothing follows: the body only returns or keeps it.
    A replay makes it of its own tensor. ``keepers``: what keeps it, beside the result."""

    array: Any
    tensor: torch.Tensor
    """The same memory, with the array's sizes and strides."""
    keepers: list[Kept]
    where: CodeLocation | None
    computed: dict[str, ArraySteps] = field(factory=dict)
    """What its methods make of it, by the place in the result."""
    standing: dict[tuple[int, str], torch.Tensor] = field(factory=dict)
    """What stands for what is made of it, by the ``id`` of that, and how it is made."""

    def standing_for(self, path: str, value: Any) -> tuple[torch.Tensor, AsArray] | None:
        """The tensor that stands for a leaf of the result, and what is made of it; None if the leaf is of no array."""
        if value is self.array:
            return self.tensor, AsArray()
        if self.computed.get(path, WRITTEN) is WRITTEN:
            return None
        kind = AsArray(self.computed[path])
        if not _is_same(kind.made_of(self.array), value):
            return None
        return self.standing.setdefault((id(value), repr(kind)), self.tensor.detach()), kind

    def note_written(self, storages: Sequence[Any] | None = None) -> None:
        """These were written, or it is not known which were. What was made of the array may be a copy, of values that
        the memory has no more: it is no leaf then."""
        if storages is None or any(one is self.tensor.untyped_storage() for one in storages):
            self.computed.update(dict.fromkeys(self.computed, WRITTEN))

    def is_placed(self, leaves: Sequence[Any]) -> bool:
        """Whether these leaves of the result have all that is made of the array; or the array, if nothing is."""
        if not self.computed:
            return any(leaf.value is self.tensor for leaf in leaves)
        standing = {id(tensor) for tensor in (self.tensor, *self.standing.values())}  # ``squeeze`` may give the array
        return self.computed.keys() <= {leaf.path for leaf in leaves if id(leaf.value) in standing}


def _is_same(made: Any, value: Any) -> bool:
    """Whether an array or number is the same, bit for bit."""
    if type(made) is not type(value):
        return False
    if not hasattr(value, "tobytes"):
        return repr(made) == repr(value)
    alike = (made.dtype, made.shape, made.strides) == (value.dtype, value.shape, value.strides)
    return bool(alike and made.tobytes() == value.tobytes())


@define(eq=False)
class RunTrace:
    """What a watch wrote down, in order of time."""

    externals: dict[int, External] = field(factory=dict)
    produced: dict[int, Produced] = field(factory=dict)
    runners: list[PackageRunner] = field(factory=list)
    lent: set[int] = field(factory=set)
    """``id`` of the storages in ``externals`` that code got which may write them without a word."""
    scratch: dict[int, torch.UntypedStorage] = field(factory=dict)
    """By ``id``: storages that were empty before the body, which gave them memory."""
    syncs: dict[tuple[str, int, bool, str | None], HostSync] = field(factory=dict)
    reads: list[str] = field(factory=list)
    """The values of compared reads, as in ``Facts.reads``."""
    kept: dict[int, tuple[Any, list[Kept]]] = field(factory=dict)
    """By the number of a read: its value, and what keeps it."""
    taken: list[int] = field(factory=list)
    """Numbers of reads that formulas take (``observe.computed``)."""
    arrays: dict[int, HandedOut] = field(factory=dict)
    """By ``id`` of the array."""
    host_copies: HostCopies = field(factory=HostCopies)
    islands: list[Island] = field(factory=list)
    breaks: list[Break] = field(factory=list)
    _broken_off: int = 0
    """How many operators ran before the last break."""
    work: list[HostWork] = field(factory=list)
    cpu_work: dict[int, tuple[str, CodeLocation | None]] = field(factory=dict)
    """Operators on the caller's CPU tensors, one a line, by its ``id``."""
    unkeyed: list[Unkeyed] = field(factory=list)
    collectives: dict[tuple[str, str], Collective] = field(factory=dict)
    """By operator and group."""
    draws: dict[tuple[str, str, CodeLocation | None], Draw] = field(factory=dict)
    gradients: dict[tuple[int, str], GradientUse] = field(factory=dict)
    hooks: list[tuple[str, CodeLocation | None]] = field(factory=list)
    """Uses of the autograd graph itself: what a replay would not do again."""
    has_checkpoints: bool = False
    """The backward pass of parts of the body runs them again, with the same draws."""
    inlined: list[Inlined] = field(factory=list)
    devices: set[str] = field(factory=set)
    memory: dict[str, MemoryInUse] = field(factory=dict)
    """By device."""
    _in_use: dict[torch.device, MemoryInUse] = field(factory=dict)
    """As ``memory``, by device object: a text for each operator would take longer than the rest."""
    sequence: list[str] = field(factory=list)
    scalars: list[tuple[str, ...]] = field(factory=list)
    lines: list[CodeLocation | None] = field(factory=list)
    num_ops: int = 0
    plain: bool = True
    """No operator so far does more than its arguments tell."""
    reads_form: bool = False
    """The results of some operator so far may follow from the form of a tensor (``OperatorTraits.reads_form``)."""
    reads_whole: bool = False
    """So they may from where whole numbers lie: memory of such is seen as other numbers, or by a foreign operator."""
    objects: set[int] = field(factory=set)
    """``id`` of the tensor objects that operators got, while the caller or the snapshot keeps them alive."""
    undo: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(factory=list)
    """Storages that operators wrote, with their contents before."""
    reshaped: list[Reshaped] = field(factory=list)
    """Tensors whose metadata was changed in place: storage, offset, sizes and strides they had."""

    def note_break(
        self, kind: Literal["value", "size", "island"], what: str, where: CodeLocation | None, ms: float | None = None
    ) -> None:
        """Note that the segment ends here."""
        self.breaks.append(Break(kind=kind, what=what, operators=self.num_ops - self._broken_off, where=where, ms=ms))
        self._broken_off = self.num_ops

    def note_memory(self, storage: Any) -> None:
        """An operator of the body made it. What has no storage of its own is not counted."""
        if not isinstance(storage, torch.UntypedStorage):
            return
        device = storage.device
        in_use = self._in_use.get(device)
        if in_use is None:
            in_use = self._in_use[device] = self.memory.setdefault(str(device), MemoryInUse())
        in_use.add(storage)

    def is_unread(self, tensor: torch.Tensor) -> bool:
        """Whether the memory existed before the body, and no operator got it."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() > 0 and id(storage) not in self.externals and id(storage) not in self.scratch

    def add_collective(
        self, op: Any, op_traits: OperatorTraits, arguments: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: Sequence[torch.Tensor], where: CodeLocation | None,
    ) -> None:  # fmt: skip
        """Note a collective, once for each operator and group. ``arguments``: positional and keyword arguments."""
        on_host = all(tensor.device.type == "cpu" for tensor in inputs)
        group = _collectives.group_name(op, *arguments)
        collective = Collective(
            op=op_traits.name, group=group, all_wait=_collectives.waits_for_all(op_traits.base), where=where,
            obstacle=_collectives.obstacle(op_traits.base, on_host=on_host),
            registers_segments=not on_host and _collectives.registers_segments(),
        )  # fmt: skip
        self.collectives.setdefault((op_traits.name, group), collective)


def scalars_of(
    op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], *, constant: torch.Tensor | None
) -> tuple[str, ...]:
    """Arguments of an operator that are no tensors, as text; ``constant``: a tensor that the body made of numbers."""
    values: list[str] = []
    if constant is not None:
        values.append(f"{constant.dtype}{tuple(constant.shape)} {digest(constant)}")
    if not op.lifts:
        for at, value in enumerate(args):
            if type(value) not in TENSORS and not is_tensor(value):
                values.append(f"{at}={_scalar(value)}")
        for name, value in kwargs.items():
            if not is_tensor(value):
                values.append(f"{name}={_scalar(value)}")
    return tuple(values)


def _scalar(value: Any) -> str:
    if type(value) in PRINTED:
        return repr(value)
    if type(value) is list and value and type(value[0]) is int:  # sizes and the like
        return repr(value) if set(map(type, value)) == _INT else f"[{', '.join(map(_scalar, value))}]"
    if is_tensor(value):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_scalar, value))}]"
    if isinstance(value, torch.ScriptObject):
        return text_of(value)
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)
