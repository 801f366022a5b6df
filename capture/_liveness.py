"""Liveness: whether anybody still uses the memory of an output.

Only the storage's own life counts: a tensor, any view of it, or a tensor saved for backward keeps it alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from capture import _torch_private
from capture._annotate import Annotation
from capture._compile import compile_plan
from capture._errors import BorrowedOutputError
from capture._facts import BorrowedUse, Facts
from capture._report import format_finding

Held = Callable[[], torch.UntypedStorage | None]
"""Called, gives the storage while somebody uses it, else None."""


hold: Callable[[torch.UntypedStorage], Held] = (
    weakref.ref if _torch_private.CAPABILITIES.storage_weakref else _torch_private.CountedStorage
)
"""Watch a storage without keeping it alive."""


def is_sole_holder(tensor: torch.Tensor) -> bool:
    """No other tensor, view or saved activation uses the tensor or its memory."""
    storage = tensor.untyped_storage()  # one holder in C++ is the tensor, one is this object
    return _torch_private.storage_use_count(storage) <= 2 and _torch_private.use_count(tensor) <= 1


class StaleTensor(torch.Tensor):
    """What a borrowed output becomes at the end of its step: every use raises."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(tensor, StaleTensor):
                    raise BorrowedOutputError(_stale_text(tensor.__dict__.get("_capture_annotation")))
        raise BorrowedOutputError(_stale_text(None))


def _stale_text(annotation: Annotation | None) -> str:
    annotation = annotation or Annotation(function="a captured function")
    use = BorrowedUse(function=annotation.function, where=annotation.defined_at)
    plan = compile_plan(annotation, Facts(function=annotation.function, borrowed_use=use))
    return "\n".join(format_finding(finding, function=annotation.function) for finding in plan.findings[:1])


def make_stale(tensor: torch.Tensor, annotation: Annotation) -> None:
    """Turn a borrowed output that is still held into one that raises, naming the function that made it."""
    tensor._capture_annotation = annotation  # type: ignore[attr-defined]
    tensor.__class__ = StaleTensor
