"""Metadata of tensors as plain data, the bytes that they span, and comparison of bits."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from capture.core.facts import TensorInfo
from capture.core.interrupts import let_through

address_of = torch.Tensor.data_ptr
_address_of_storage = torch.UntypedStorage.data_ptr
_strides_of = torch.Tensor.stride
nbytes_of = torch.UntypedStorage.nbytes
"""torch's own function, also while a body is watched, when a slower one takes its place."""
_WHOLE = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Metadata as plain data."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return _one_of_each(
        dtype=_name(tensor.dtype),
        shape=tuple(tensor.shape) if not tensor.is_nested else (),
        stride=tuple(tensor.stride()) if strided else (),
        device=_name(tensor.device),
        requires_grad=tensor.requires_grad,
        layout=_name(tensor.layout),
        nbytes=span_bytes(tensor) if strided else 0,
    )


@functools.lru_cache(maxsize=2048)
def _one_of_each(**parts: Any) -> TensorInfo:
    """Share equal values: what is kept of a run has the same few again and again."""
    return TensorInfo(**parts)


@functools.cache
def _name(value: torch.dtype | torch.device | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single number is contiguous whatever its stride


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All memory of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal metadata and equal bits, NaN payloads included."""
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and (one.numel() == 0 or torch.equal(_bytes(one), _bytes(other)))


def digest(tensor: torch.Tensor) -> str:
    """A number that depends on the tensor's values. It reads the storage, as reads of tensors are watched."""
    data = bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage().tolist())
    return hashlib.sha256(data).hexdigest()[:16]


def alias_groups(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Number of the group of tensors whose memory overlaps, None for a tensor that shares with nobody. Groups are
    numbered by their first tensor: which of them lies first in memory is chance, and must not tell two calls apart."""
    spans = []
    for position, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel():
            begin = tensor.data_ptr()
            spans.append((_name(tensor.device), begin, begin + span_bytes(tensor), position))
    spans.sort()
    groups: list[int | None] = [None] * len(tensors)
    number = -1
    device, end, last = "", -1, -1
    for this, begin, stop, position in spans:
        if this == device and begin < end:
            if groups[last] is None:
                number += 1
                groups[last] = number
            groups[position] = groups[last]
            end = max(end, stop)
        else:
            device, end = this, stop
        last = position
    first: dict[int, int] = {}
    return [None if group is None else first.setdefault(group, len(first)) for group in groups]


def any_overlap(begins: Sequence[int], spans: Sequence[int]) -> bool:
    """Whether two of these pieces of memory share bytes; pieces of no bytes share nothing."""
    end = -1
    for begin, span in sorted(zip(begins, spans, strict=True)):
        if span:
            if begin < end:
                return True
            end = begin + span
    return False


def storage_of(tensor: torch.Tensor) -> Any:
    """The storage object; the tensor itself where there is none (sparse, some subclasses)."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        let_through(error)
        return tensor


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this form covers its memory without gaps or overlaps, in some order of its dimensions."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def leading_ones(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many dimensions of size 1 stand before all others in a contiguous tensor, their strides in order and beyond
    all else. Such strides tell no element's place; nor do they change the order of dimensions, by which kernels go."""
    count = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    expected = 1
    for size, step in zip(reversed(shape[count:]), reversed(stride[count:]), strict=True):
        if size > 1 and step != expected:
            return 0
        expected *= size
    steps = (*stride[:count], expected)
    return count if all(outer >= inner for outer, inner in itertools.pairwise(steps)) else 0


def is_whole(dtype: torch.dtype) -> bool:
    """Whether numbers of this kind are whole, so that kernels sum them to the same in any order."""
    return dtype in _WHOLE


def is_in_order(tensor: torch.Tensor) -> bool:
    """Whether it is a contiguous tensor no dimension of which has smaller strides than those after it."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_contiguous():
        return False
    strides = _strides_of(tensor)
    return all(map(operator.ge, strides, strides[1:]))


def plain_strides(shape: Sequence[int], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides with those of ``leading_ones`` as in a tensor of its own."""
    count = leading_ones(shape, stride)
    return (math.prod(shape),) * count + stride[count:]


def is_part_of_one(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether all of its memory is covered by one other tensor, gaps left aside."""
    begin, end = range_of(tensor)
    return begin == end or any(
        first <= begin and end <= last and is_dense(one.shape, one.stride())
        for one, (first, last) in ((one, range_of(one)) for one in others)
    )


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one after its last."""
    begin = address_of(tensor)
    return begin, begin + span_bytes(tensor)


def memory_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Addresses of a storage's first byte and of the one after its last."""
    begin = _address_of_storage(storage)
    return begin, begin + nbytes_of(storage)


def merged(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Begins and ends of the memory that sorted ranges cover together, both ascending."""
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in ranges:
        if begin == end:
            continue
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(begin)
            ends.append(end)
    return begins, ends
