"""Liveness: whether anybody still uses the memory of an output.

Only the storage's own life counts: a tensor, any view of it, or a tensor saved for backward keeps it alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from capture import _torch_private
from capture._errors import BorrowedOutputError
from capture._facts import Where

Held = Callable[[], torch.UntypedStorage | None]
"""Called, gives the storage while somebody uses it, else None."""


def hold(storage: torch.UntypedStorage) -> Held:
    """Watch a storage without keeping it alive."""
    if _torch_private.CAPABILITIES.storage_weakref:
        return weakref.ref(storage)
    return _torch_private.CountedStorage(storage)


def is_sole_holder(tensor: torch.Tensor) -> bool:
    """No other tensor, view or saved activation uses the tensor's memory."""
    storage = tensor.untyped_storage()  # one holder in C++ is the tensor, one is this object
    return _torch_private.storage_use_count(storage) <= 2


class StaleTensor(torch.Tensor):
    """What a borrowed output becomes at the end of its step: every use raises."""

    _stale_message: str

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN206
        for argument in args:
            if isinstance(argument, StaleTensor):
                raise BorrowedOutputError(argument.__dict__.get("_stale_message", "a borrowed output was used"))
        raise BorrowedOutputError("a borrowed output was used after its step")


def make_stale(tensor: torch.Tensor, function: str, where: Where | None) -> None:
    """Turn a borrowed output that is still held into one that raises, naming the line that made it."""
    place = f", made at {where}" if where is not None else ""
    tensor._stale_message = (  # type: ignore[attr-defined]
        f"CG404 borrowed-output-used: an output of {function}{place} was used after its step ended, when its memory "
        'may hold other values. Copy it within the step (out.clone(), one copy), or decorate with outputs="preserve" '
        '(a copy only while it is held) or outputs="clone" (always a copy).'
    )
    tensor.__class__ = StaleTensor  # type: ignore[assignment]
