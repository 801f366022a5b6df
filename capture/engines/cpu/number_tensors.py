"""Numbers that operators get in the place of tensors, made tensors once instead of in every call.

Where a schema says ``Tensor`` and the body gives a number (``x * 2``), torch makes a tensor of it without dimensions
and converts that to the type it computes in, which takes longer than the rest of a small operator. Among tensors of one
type that computes in itself, a tensor of that type with that value does the same: such a number decides no type (a
float among integers does, and is left alone), and kernels for float32, float64 and integers see a tensor either way.
Those for half precision ask for the number itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from capture.observe.operator_schema import Operator

_FLOATS = frozenset([torch.float32, torch.float64])
_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
_NUMBERS = frozenset([int, float])
NO_NUMBERS: Mapping[int, torch.Tensor] = types.MappingProxyType({})
"""What most operators get: one object, as each recording has many of them."""
_EXACT = 2**53
"""Integers up to here are rounded once, whatever way they are converted."""


def tensors_for_numbers(
    op: Operator, args: Sequence[Any], given: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
    known: dict[Any, torch.Tensor],
) -> Mapping[int, torch.Tensor]:  # fmt: skip
    """By position among ``args``; empty where a number may decide more than a value. ``given``: the tensors that the
    operator gets. ``known``: those made before, to which it adds: no operator writes them."""
    numbers = {type(value) for value in args} & _NUMBERS
    if not numbers or len(kinds := {tensor.dtype for tensor in given}) != 1:
        return NO_NUMBERS
    (kind,) = kinds
    if kind not in _FLOATS and (float in numbers or kind not in _INTEGERS):
        return NO_NUMBERS
    if any(result.dtype not in (kind, torch.bool) for result in results):
        return NO_NUMBERS
    where, compares = _takes_tensor(op)
    if compares and all(result.dtype is torch.bool for result in results):
        where |= compares
    found: dict[int, torch.Tensor] = {}
    for at, value in enumerate(args):
        if at in where and type(value) in _NUMBERS and _is_exact(value, kind):
            key = kind, repr(value)
            if key not in known:
                known[key] = torch.tensor(value, dtype=kind, device="cpu")
            found[at] = known[key]
    return found or NO_NUMBERS


@functools.lru_cache(maxsize=1024)
def _takes_tensor(op: Operator) -> tuple[frozenset[int], frozenset[int]]:
    """Where torch makes a tensor of a number: where the schema says so, and in comparisons, which have an overload for
    numbers that does. Their results are no numbers, so that nothing can be rounded in another way."""
    kinds = [str(argument.type) for argument in op._schema.arguments]
    compares = op._overloadname == "Scalar" and "Tensor" in op.overloadpacket.overloads()
    numbers = [at for at, kind in enumerate(kinds) if compares and kind == "number"]
    return frozenset([at for at, kind in enumerate(kinds) if kind == "Tensor"]), frozenset(numbers)


def with_tensors(args: tuple[Any, ...], numbers: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
    """Arguments with these in the place of numbers."""
    if not numbers:
        return args
    return tuple(numbers.get(at, value) if type(value) in _NUMBERS else value for at, value in enumerate(args))


def _is_exact(value: float, kind: torch.dtype) -> bool:
    if type(value) is float:
        return True
    if kind in _FLOATS:
        return abs(value) <= _EXACT
    limits = torch.iinfo(kind)
    return limits.min <= value <= limits.max
