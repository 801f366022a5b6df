"""Ambient modes: process and thread state that changes what a body computes; part of the key.

Read in full (2 us) only when the fast comparison of the last reading fails.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from capture import _torch_private

Ambient = tuple[Any, ...]


class _Last(threading.local):
    guard: Any = None  # GlobalStateGuard of the last full reading
    inference: bool = False
    modes: int = -1
    flags: tuple[Any, ...] = ()
    ambient: Ambient = ()


_last = _Last()
_autocast_types = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)


def ambient() -> Ambient:
    """The modes in force now, hashable, free of addresses and the same in every process."""
    last = _last
    guard = last.guard
    if (
        guard is not None
        and guard.check()
        and last.inference is torch.is_inference_mode_enabled()
        and last.modes == _torch_private.function_mode_depth() == 0
        and last.flags == _torch_private.unguarded_flags()
    ):
        return last.ambient
    return _read(last)


def _read(last: _Last) -> Ambient:
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in _autocast_types if torch.is_autocast_enabled(kind)
    )
    last.ambient = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_num_threads(),
        _torch_private.unguarded_flags(),
    )
    last.inference = torch.is_inference_mode_enabled()
    last.modes = _torch_private.function_mode_depth()
    last.flags = _torch_private.unguarded_flags()
    if _torch_private.CAPABILITIES.global_state_guard:
        last.guard = _torch_private.GlobalStateGuard()
    return last.ambient
