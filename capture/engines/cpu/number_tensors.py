"""Numbers that operators get in the place of tensors, made tensors once instead of in every call.

Where a schema says ``Tensor`` and the body gives a number (``x * 2``), torch makes a tensor of it without dimensions
and converts that to the type it computes in, which takes longer than the rest of a small operator. Among tensors of one
type that computes in itself, a tensor of that type with that value does the same: such a number decides no type (a
float among integers does, and is left alone), and kernels for float32, float64 and integers see a tensor either way.
Those for half precision ask for the number itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from capture.observe.operator_schema import Operator, tensors_in

_FLOATS = frozenset([torch.float32, torch.float64])
_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
_EXACT = 2**53
"""Integers up to here are rounded once, whatever way they are converted."""


def tensors_for_numbers(
    op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """By position among ``args``; empty where a number may decide more than a value."""
    kinds = {tensor.dtype for tensor in tensors_in(tuple(args), dict(kwargs))}
    if len(kinds) != 1 or (any(type(value) is float for value in args) and not kinds <= _FLOATS):
        return {}
    (kind,) = kinds
    if kind not in _FLOATS | _INTEGERS or any(result.dtype not in (kind, torch.bool) for result in results):
        return {}
    tensors: dict[int, torch.Tensor] = {}
    for at, (argument, value) in enumerate(zip(op._schema.arguments, args, strict=False)):
        if type(value) in (int, float) and _takes_tensor(op, argument, results) and _is_exact(value, kind):
            tensors[at] = torch.tensor(value, dtype=kind, device="cpu")
    return tensors


def _takes_tensor(op: Operator, argument: Any, results: Sequence[torch.Tensor]) -> bool:
    """Whether torch makes a tensor of a number there: where the schema says so, and in comparisons, which have an
    overload for numbers that does. Their results are no numbers, so that nothing can be rounded in another way."""
    if str(argument.type) == "Tensor":
        return True
    compares = op._overloadname == "Scalar" and all(result.dtype is torch.bool for result in results)
    return compares and str(argument.type) == "number" and "Tensor" in op.overloadpacket.overloads()


def with_tensors(args: Sequence[Any], numbers: Mapping[int, torch.Tensor]) -> tuple[Any, ...]:
    """Arguments with these in the place of numbers."""
    return tuple(numbers.get(at, value) if type(value) in (int, float) else value for at, value in enumerate(args))


def _is_exact(value: float, kind: torch.dtype) -> bool:
    if type(value) is float:
        return True
    if kind in _FLOATS:
        return abs(value) <= _EXACT
    limits = torch.iinfo(kind)
    return limits.min <= value <= limits.max
