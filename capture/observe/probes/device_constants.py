"""``torch.tensor(..., device=...)``, ``x[[0, 2]]`` and the like, as a tensor made on the CPU and a copy of it.

torch makes such a tensor in one step that no dispatch mode sees, and that no capture survives. While a body is watched
it is made in two steps: so the values are seen, and a recorder can keep them on the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from capture.torch_private import capabilities, devices
from capture.torch_private.monkeypatch import replaced

_NAMES = ("tensor", "as_tensor", "asarray", "scalar_tensor")
_INDEXING = ("__getitem__", "__setitem__")


@contextmanager
def constants_on_host() -> Iterator[None]:
    """In the block and in this thread, make such tensors in two steps. Nothing changes where no device captures
    kernels."""
    if not devices.has_captures():
        yield
        return
    thread = threading.get_ident()
    functions = {name: _wrapper(getattr(torch, name), thread) for name in _NAMES}
    methods = {name: _indexing(getattr(torch.Tensor, name), thread) for name in _INDEXING}
    methods["new_tensor"] = _new_tensor(torch.Tensor.new_tensor, thread)
    with replaced(torch, functions), replaced(torch.Tensor, methods):
        yield


def _wrapper(original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
        plain = functools.partial(original, data, *args, requires_grad=requires_grad, **kwargs)
        if requires_grad is False:
            plain = functools.partial(original, data, *args, **kwargs)
        elsewhere = isinstance(data, torch.Tensor) or hasattr(data, "__cuda_array_interface__")
        if elsewhere or torch.compiler.is_compiling() or threading.get_ident() != thread:
            return plain() if device is None else plain(device=device)
        target = _default_device() if device is None else torch.device(device)
        if not devices.captures_kernels(target):
            return plain() if device is None else plain(device=device)
        made = original(data, *args, device="cpu", **kwargs).to(target)
        return made.requires_grad_() if requires_grad else made

    return make


def _default_device() -> torch.device:
    """As ``torch.get_default_device``, which calls ``torch.tensor`` where the default names no index."""
    with capabilities.unseen():
        return torch.empty(0).device


def _new_tensor(original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_tensor(self: torch.Tensor, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        target = self.device if device is None else torch.device(device)
        elsewhere = isinstance(data, torch.Tensor) or args or kwargs.get("requires_grad")
        captures = devices.captures_kernels(target)
        if elsewhere or not captures or torch.compiler.is_compiling() or threading.get_ident() != thread:
            return original(self, data, *args, **kwargs, **({} if device is None else {"device": device}))
        dtype = kwargs.get("dtype") or self.dtype
        return torch.tensor(data, dtype=dtype, device=target)

    return new_tensor


def _indexing(original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def indexed(self: torch.Tensor, index: Any, *value: Any) -> Any:
        here = threading.get_ident() == thread and not torch.compiler.is_compiling()
        if here and devices.captures_kernels(self.device):
            index = tuple(map(_as_tensor, index)) if type(index) is tuple else _as_tensor(index)
        return original(self, index, *value)

    return indexed


def _as_tensor(index: Any) -> Any:
    """A list of integers in brackets; masks and nested lists stay as they are."""
    plain = type(index) is list and index and all(type(one) is int for one in index)
    return torch.tensor(index, device="cpu") if plain else index
