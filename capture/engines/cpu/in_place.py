"""Operators that write what they are given, in the form of Python's bindings.

The entry that the dispatcher gives for an overload takes up to twice as long to call as the method of the same name.
Such an operator cannot be run again to prove that both do the same, so the method runs on copies that were made before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from capture.core.data import frozen
from capture.core.interrupts import is_interrupt
from capture.engines.cpu.number_tensors import with_tensors
from capture.engines.staging import ALIGNMENT, dense_enough
from capture.key.tensor_meta import same_bits
from capture.observe.operator_schema import OperatorTraits, tensors_in
from capture.torch_private import operators
from capture.torch_private.warned import warned

_MOST = 1 << 20
"""Bytes to copy: beyond them a call's own cost is nothing."""


def in_place_form(known: OperatorTraits) -> Callable[..., Any] | None:
    """A Python binding that may do what the operator does, which writes its first argument or members of that."""
    if known.namespace != "aten" or known.draws or known.norm is not None or known.writes != (0,):
        return None
    return operators.in_place_binding(known.base)


@frozen(eq=False)
class InPlaceTrial:
    """A form that is tried on copies of what the operator writes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """What the operator writes, and the copies."""

    def holds(self) -> bool:
        """Whether the form leaves the same bits in the copies, once the operator has run."""
        try:
            with torch.no_grad():
                _, objected = warned(self.function, *self.args, **self.kwargs)
        except Exception as error:  # any objection means that this form is not used
            if is_interrupt(error):
                raise
            return False
        return not objected and all(same_bits(tensor, copy) for tensor, copy in self.pairs)


def trial_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Mapping[int, torch.Tensor]
) -> InPlaceTrial | None:
    """None where what is written is large, lies otherwise than a copy would, or is read as another tensor, too."""
    written = tensors_in(args[:1], {})
    storages = {id(tensor.untyped_storage()) for tensor in written}
    others = [tensor for tensor in tensors_in(args[1:], kwargs) if id(tensor.untyped_storage()) in storages]
    if (
        len(storages) < len(written)
        or sum(tensor.numel() * tensor.element_size() for tensor in written) > _MOST
        or not all(
            dense_enough(tensor) and tensor.data_ptr() % ALIGNMENT == 0 and not tensor.is_conj() for tensor in written
        )
        or any(all(tensor is not target for target in written) for tensor in others)
    ):
        return None
    with torch.no_grad():
        copies = {
            id(tensor): torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(
                tensor
            )
            for tensor in written
        }
    given = with_tensors(_replaced(args, copies), numbers)
    pairs = [(tensor, copies[id(tensor)]) for tensor in written]
    return InPlaceTrial(function, given, {key: _replaced(value, copies) for key, value in kwargs.items()}, pairs)


def _replaced(value: Any, by: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_replaced(member, by) for member in value])
    return by.get(id(value), value)
