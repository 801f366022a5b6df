"""Autocast's cache: whether what was cast in a block of ``torch.autocast`` is still kept.

In a block torch casts a weight once, for all its uses, and keeps the cast until the outermost block ends or somebody
clears the cache, in any thread. It tells of neither. So a weight of this library's own is cast, one without elements,
and the cast is looked up where autograd has saved it. As long as it lives the cache is the same.

Fallback where torch does not show what it saved: each call counts as a block of its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from capture.torch_private import devices
from capture.torch_private.autograd import is_leaf_node, name_of

_GRAD_FN: Any = torch._C.TensorBase.grad_fn  # torch's own: while a body is watched, a wrapper is in its place


class _Cast(weakref.ref[torch.Tensor]):
    __slots__ = ()

    @override
    def __eq__(self, other: object) -> bool:
        return self is other

    @override
    def __hash__(self) -> int:
        return id(self)


_kept: dict[Any, dict[Any, Any]] = {}
"""What is kept, by the cast that lives as long as autocast's cache. C code removes an entry when the cast dies."""
_local = threading.local()


def low_precision(device_type: str) -> torch.dtype | None:
    """What weights on such a device are cast to, once for all uses, in the block around; None where there is none."""
    if not torch.is_autocast_cache_enabled() or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def kept_with_cache() -> dict[Any, Any]:
    """What this thread keeps for as long as autocast's cache, to be filled."""
    found = _kept.get(_local.cast) if hasattr(_local, "cast") else None
    if found is None:
        _keep(found := {})
    return found


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """Autocast's cache is empty in the block, and afterwards. What was kept with it stays, and what the block keeps."""
    before = _kept_now()
    outer, _local.around = kept_around(), before
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        _local.around = outer
        kept = {**_kept_now(), **before}
        torch.clear_autocast_cache()
        if kept:
            _keep(kept)


def kept_around() -> dict[Any, Any]:
    """What is kept with the cache of the block around ``cleared``."""
    around: dict[Any, Any] = getattr(_local, "around", {})
    return around


def _kept_now() -> dict[Any, Any]:
    return _kept.get(getattr(_local, "cast", None), {})


def _keep(what: dict[Any, Any]) -> None:
    on = [kind for kind in devices.AUTOCAST_TYPES if torch.is_autocast_enabled(kind)]
    with contextlib.ExitStack() as around:
        if not on and devices.autocast_depth():  # else the cache would end with the block
            around.enter_context(torch.autocast("cpu", torch.bfloat16))
        with torch.enable_grad():
            weight = _weight(on[0] if on else "cpu")
            cast = getattr(_GRAD_FN.__get__(torch.mm(weight, weight)), "_saved_mat2", None)
    if cast is not None and cast.dtype is not weight.dtype:
        _local.cast = kept = _Cast(cast, _kept.pop)
        _kept[kept] = what


class _Looking(TorchDispatchMode):
    """Finds what an operator gets that has a place in a graph."""

    def __init__(self, node: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.node = node
        self.found: torch.Tensor | None = None

    @override
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in args:
            if isinstance(one, torch.Tensor) and _GRAD_FN.__get__(one) == self.node:
                self.found = one
        return op(*args, **(kwargs or {}))


def looked_up(leaf: torch.Tensor, node: Any) -> torch.Tensor | None:
    """The cast of a leaf that autocast keeps now, if it is the one with this node: what an operator without elements
    gets."""
    if not leaf.dim():
        return None
    nothing = torch.empty(leaf.shape[-1], 0, dtype=leaf.dtype, device=leaf.device)
    looking = _Looking(node)
    with looking, torch.enable_grad():
        torch.matmul(leaf, nothing)
    return looking.found


@functools.cache
def _weight(device_type: str) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.zeros(0, 0, device=device_type, dtype=torch.float32, requires_grad=True)


def cast_of(node: Any) -> tuple[Any, torch.dtype] | None:
    """For a node that casts a leaf: the leaf's node, and the dtype that it is cast to; None for any other node. Without
    torch's names for that no weight counts as cast."""
    if name_of(node) != "ToCopyBackward0":
        return None
    above = node.next_functions[0][0]
    made = getattr(node, "_input_metadata", ())
    return (above, made[0].dtype) if made and is_leaf_node(above) else None
