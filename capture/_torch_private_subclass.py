"""Names of torch for tensors that hold other tensors, each behind a probe with a stated fallback."""

from __future__ import annotations

import functools
from typing import Any

import torch

try:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as _is_wrapper_type
except ImportError:  # pragma: no cover - without it such tensors are not opened, and what takes them runs eagerly

    def _is_wrapper_type(t: type) -> bool:  # type: ignore[misc]
        return False


_get_mode = getattr(torch._C, "_get_dispatch_mode", None)
_FAKE = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


@functools.cache
def is_wrapper(kind: type) -> bool:
    """A tensor subclass that ``__tensor_flatten__`` opens and ``__tensor_unflatten__`` closes again."""
    return issubclass(kind, torch.Tensor) and bool(_is_wrapper_type(kind))


def open_wrapper(value: Any) -> tuple[list[str], Any]:
    """Names of the attributes that hold its tensors (and, from torch 2.13 on, other objects), and the rest."""
    names, context = value.__tensor_flatten__()
    return names, context


def close_wrapper(like: Any, members: dict[str, Any]) -> Any:
    """A tensor like this one around other members of the same metadata."""
    _, context = open_wrapper(like)
    return type(like).__tensor_unflatten__(members, context, like.shape, like.stride())


def only_shapes() -> bool:
    """Operators are run on tensors without values now, as ``DTensor`` does to learn shapes. Without these names they
    count as the body's own, and what uses them runs eagerly."""
    return _get_mode is not None and _FAKE is not None and _get_mode(_FAKE) is not None
