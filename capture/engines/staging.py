"""Buffers in the pool for inputs that are copied, and fresh aliases for managed ones. Used by every engine.

A buffer has its input's strides and its address modulo 64, so that kernels take the same code paths as in eager calls.
Inputs that share memory, or whose own elements do, are staged as the bytes they span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from attrs import evolve, field

from capture.core.data import define
from capture.engines.base import Block, Geometry, Input
from capture.key.tensor_kind import is_leaf
from capture.key.tensor_meta import same_bits, span_bytes
from capture.state.call import Call

_set = torch.Tensor.set_  # torch's own, also while a body is watched

ALIGNMENT = 64  # bytes; what torch's CPU allocator gives, and a divisor of what its CUDA allocator gives


class StagingPool(Protocol):
    """The part of a pool that staging needs."""

    def storage(self, block: Block) -> torch.UntypedStorage:
        """A new storage over a block."""

    def overlay(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Another storage over a caller's memory, which has to outlive it."""

    def take(self, nbytes: int) -> tuple[Block, torch.UntypedStorage]:
        """A free block and the storage that holds it."""


@define
class SingleInput:
    """One input with a buffer of its own. ``back``: the buffer is copied back after every replay. ``lent``: it is not,
    but code got it that may write it without a word."""

    position: int
    block: Block
    tensor: torch.Tensor
    back: bool
    lent: bool = False
    is_counted: bool = True
    """Autograd is to notice that it is copied back."""


@define
class InputGroup:
    """Inputs staged together: ``nbytes`` from the first one's first byte on, ``lead`` bytes into the storage."""

    members: list[int]
    nbytes: int
    lead: int
    block: Block
    storage: torch.UntypedStorage
    back: bool
    dtype: torch.dtype | None = None
    """Of a group of one tensor, whose bytes can be read as a row of numbers."""
    uncounted: Set[int] = frozenset()
    """Members that the body writes without counting it, see ``ObservedRun.uncounted_writes``."""
    lent: bool = False

    def copier(self) -> Callable[[Sequence[Any]], None]:
        """``copy_in`` with gradients switched off, prepared for one tensor: mostly a gradient that is one number for
        all elements, as that of a sum or mean is."""
        if self.dtype is None:
            return self.copy_in
        count = self.nbytes // self.dtype.itemsize
        form = Geometry(dtype=self.dtype, offset=self.lead // self.dtype.itemsize, shape=(count,), stride=(1,))
        copy, position, row = over(self.storage, form).copy_, self.members[0], ((count,), (1,))

        def copy_row(leaves: Sequence[Any]) -> None:
            copy(leaves[position].as_strided(*row))

        return copy_row

    def copy_in(self, leaves: Sequence[Any]) -> None:
        """Copy the caller's bytes into the buffer."""
        theirs, ours = _spans(leaves, self)
        with torch.no_grad():
            ours.copy_(theirs)

    def copy_out(self, leaves: Sequence[Any]) -> None:
        """Copy the buffer over the caller's bytes."""
        theirs, ours = _spans(leaves, self)
        with torch.no_grad():
            theirs.copy_(ours)
            for position in self.members:
                if position not in self.uncounted and not leaves[position].is_inference():
                    torch.autograd.graph.increment_version(leaves[position])

    def put_back(self, leaves: Sequence[Any]) -> None:
        """Copy the buffer over the caller's bytes if they differ, as ``put_back``."""
        _put_back(*_spans(leaves, self))


@define(eq=False)
class Staging:
    """How the inputs of one recording reach it. ``replacements``: what the body gets instead, by position."""

    replacements: dict[int, torch.Tensor] = field(factory=dict)
    singles: list[SingleInput] = field(factory=list)
    groups: list[InputGroup] = field(factory=list)
    gradients: dict[int, torch.Tensor] = field(factory=dict)
    """The gradients that stand-ins for arguments were given, by ``id`` of the stand-ins."""
    managed: dict[Block, torch.UntypedStorage] = field(factory=dict)
    """The storage through which the body sees each managed block."""

    def storages(self) -> list[torch.UntypedStorage]:
        """Storages of all buffers."""
        return [single.tensor.untyped_storage() for single in self.singles] + [group.storage for group in self.groups]

    def ask_for_gradients(self, leaves: Sequence[Any]) -> None:
        """The body may run backward passes of its own: what stands in for an argument needs gradients as that does.

        An argument that is used where it lives and was computed by code before the call gets a stand-in, too: autograd
        hands its gradient to the stream of that code, which a capture must not touch. So does one whose gradient is an
        input itself: what stands in for that is its gradient.
        """
        asking: dict[int, torch.Tensor] = {}
        given = {id(leaf): position for position, leaf in enumerate(leaves)}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                continue
            staged = self.replacements.get(position)
            begins = is_leaf(leaf)
            gradient = given.get(id(leaf.grad)) if begins else None
            is_shown = gradient is None and (begins or type(leaf) is not torch.Tensor)
            if staged is None and (is_shown or leaf.layout is not torch.strided):
                continue
            shown = leaf if staged is None else staged
            if id(shown) not in asking:  # the same object in two places stays one
                asking[id(shown)] = shown.detach().requires_grad_()
                if gradient is not None:
                    asking[id(shown)].grad = given_gradient = self.replacements.get(gradient, leaves[gradient])
                    self.gradients[id(asking[id(shown)])] = given_gradient
            self.replacements[position] = asking[id(shown)]

    def end_run(self) -> None:
        """The body is over: what it left in ``.grad`` of stand-ins is in its effects, or nobody's. One that was given a
        gradient and still has it keeps it: after a fault of this library it is compared with what was there before."""
        for staged in self.replacements.values():
            if staged.requires_grad and staged.grad is not self.gradients.get(id(staged)):
                staged.grad = None
        self.replacements.clear()
        self.gradients.clear()

    def copy_back_only(self, written: Set[int]) -> None:
        """Positions that this run wrote, of a body that may write others in another run."""
        for single in self.singles:
            single.back = single.back and single.position in written
        for group in self.groups:
            group.back = group.back and not written.isdisjoint(group.members)

    def leave_uncounted(self, positions: Set[int]) -> None:
        """Positions that the body does not count as written, see ``ObservedRun.uncounted_arguments``."""
        for single in self.singles:
            single.is_counted = single.position not in positions
        for group in self.groups:
            group.uncounted = positions & set(group.members)

    def lend(self, storages: Set[int]) -> None:
        """Buffers on these storages, by ``id``, were handed to code that may write them unseen."""
        for single in self.singles:
            single.lent = not single.back and id(single.tensor.untyped_storage()) in storages
        for group in self.groups:
            group.lent = not group.back and id(group.storage) in storages


def stage(pool: StagingPool, call: Call, inputs: Sequence[Input]) -> Staging:
    """Buffers and aliases for all inputs that need them; contents are not copied yet."""
    staging = Staging()
    aliases: dict[int, torch.Tensor] = {}
    grouped: dict[int, list[Input]] = {}
    apart: dict[int, torch.UntypedStorage] = {}
    for item in inputs:
        leaf = call.leaves[item.position]
        if item.is_apart:
            storage = leaf.untyped_storage()
            if id(leaf) not in aliases:
                apart[id(storage)] = apart.get(id(storage)) or pool.overlay(storage)
                aliases[id(leaf)] = over(apart[id(storage)], Geometry.of(leaf))
            staging.replacements[item.position] = aliases[id(leaf)]
        elif item.how == "managed" and item.managed is not None:
            if id(leaf) not in aliases:  # one object given twice stays one object
                aliases[id(leaf)] = _alias(pool, staging, item.managed, leaf)
            staging.replacements[item.position] = aliases[id(leaf)]
        elif item.how in ("copy", "copy-back"):
            if item.group is None and dense_enough(leaf):
                _stage(pool, staging, item, leaf)
            else:
                grouped.setdefault(item.group if item.group is not None else -1 - item.position, []).append(item)
    for members in grouped.values():
        _stage_group(pool, staging, members, call.leaves)
    if not (call.keeps_program or torch.is_inference_mode_enabled()):  # a body may switch gradients on
        staging.ask_for_gradients(call.leaves)
    return staging


def _alias(pool: StagingPool, staging: Staging, block: Block, leaf: torch.Tensor) -> torch.Tensor:
    storage = staging.managed.get(block)  # views of one output share memory here, too
    if storage is None:
        storage = staging.managed[block] = pool.storage(block)
    return over(storage, Geometry.of(leaf))


def _stage(pool: StagingPool, staging: Staging, one: Input, leaf: torch.Tensor) -> None:
    lead = leaf.data_ptr() % ALIGNMENT if leaf.numel() else 0
    block, storage = pool.take(span_bytes(leaf) + lead)
    staged = over(storage, evolve(Geometry.of(leaf), offset=lead // leaf.element_size()))
    staging.replacements[one.position] = staged
    staging.singles.append(SingleInput(one.position, block, staged, one.how == "copy-back"))


def _stage_group(pool: StagingPool, staging: Staging, members: list[Input], leaves: Sequence[Any]) -> None:
    tensors = [leaves[member.position] for member in members]
    begin = min(tensor.data_ptr() for tensor in tensors)
    nbytes = max(tensor.data_ptr() + span_bytes(tensor) for tensor in tensors) - begin
    lead = begin % ALIGNMENT
    block, storage = pool.take(nbytes + lead)
    back = any(member.how == "copy-back" for member in members)
    staged: dict[int, torch.Tensor] = {}
    for member, tensor in zip(members, tensors, strict=True):
        if id(tensor) not in staged:
            shift = (lead + tensor.data_ptr() - begin) // tensor.element_size()
            staged[id(tensor)] = over(storage, evolve(Geometry.of(tensor), offset=shift))
        staging.replacements[member.position] = staged[id(tensor)]
    group = InputGroup([member.position for member in members], nbytes, lead, block, storage, back)
    (first, *others), size = tensors, tensors[0].element_size()
    if not (others or first.is_conj() or first.is_neg() or lead % size or nbytes % size):
        group.dtype = first.dtype
    staging.groups.append(group)


def dense_enough(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as far as sizes and strides tell, so that ``copy_`` may write it."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return True


def over(storage: torch.UntypedStorage, geometry: Geometry) -> torch.Tensor:
    """A tensor with this geometry on the storage."""
    if torch.is_inference_mode_enabled():  # what is made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            return over(storage, geometry)
    empty = torch.empty(0, dtype=geometry.dtype, device=storage.device)  # whatever the default device is
    tensor = _set(empty, storage, geometry.offset, geometry.shape, geometry.stride)
    return tensor.conj() if geometry.conj else tensor


def give_memory(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    """The tensor lies on another storage from here on, in the same form, and no version counter tells of it."""
    geometry = Geometry.of(tensor)
    needed = geometry.offset * tensor.element_size() + span_bytes(tensor)
    if storage.nbytes() < needed:  # an operator that could not resize it has set its sizes before
        storage.resize_(needed)
    if tensor.is_inference():  # ``data`` would make it a tensor of the other kind
        with torch.inference_mode():
            _set(tensor, storage, geometry.offset, geometry.shape, geometry.stride)
    else:
        tensor.data = over(storage, geometry)


def copy_uncounted(leaf: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy the buffer over the caller's tensor, and leave its version counter as it is."""
    leaf.data.copy_(staged)


def put_back(leaf: torch.Tensor, staged: torch.Tensor) -> None:
    """Give the caller's tensor what code that tells nothing may have written into its buffer.

    Eager code of that kind would not have counted the write, so it is not counted here. On the CPU equal bits are not
    written, since memory there may be read-only; elsewhere a look at them would wait for the device.
    """
    _put_back(over(leaf.untyped_storage(), Geometry.of(leaf)) if leaf.is_inference() else leaf.data, staged)


def _put_back(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    if theirs.device.type != "cpu" or not same_bits(theirs, ours):
        theirs.copy_(ours)


def _spans(leaves: Sequence[Any], group: InputGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes that a group of tensors spans, gaps included: the caller's and the buffer's."""
    first = min((leaves[position] for position in group.members), key=torch.Tensor.data_ptr)
    offset = int(first.storage_offset()) * first.element_size()
    theirs = over(first.untyped_storage(), _bytes(offset, group.nbytes))
    return theirs, over(group.storage, _bytes(group.lead, group.nbytes))


def _bytes(offset: int, nbytes: int) -> Geometry:
    return Geometry(dtype=torch.uint8, offset=offset, shape=(nbytes,), stride=(1,))
