"""Ambient modes: process and thread state that changes what a body computes; part of the key.

Read in full (2 us) only when the fast comparison of the last reading fails.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from typing_extensions import override

from capture import _torch_private


class Ambient:
    """One combination of modes. There is one object for each, so that comparing and hashing take no time."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    @override
    def __repr__(self) -> str:
        return f"Ambient{self.values!r}"


_known: dict[tuple[Any, ...], Ambient] = {}


class _Last(threading.local):
    guard: Any = None  # GlobalStateGuard of the last full reading
    inference: bool = False
    modes: int = -1
    flags: tuple[Any, ...] = ()
    ambient: Ambient = Ambient(())


_last = _Last()
_autocast_types = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)
_is_inference = torch.is_inference_mode_enabled
_function_mode_depth = _torch_private.function_mode_depth
_flags = _torch_private.unguarded_flags


def ambient() -> Ambient:
    """The modes in force now, free of addresses and the same in every process."""
    last = _last
    guard = last.guard
    if (
        guard is not None
        and guard.check()
        and last.inference is _is_inference()
        and last.flags == _flags()
        and last.modes == 0 == _function_mode_depth()
    ):
        return last.ambient
    return _read(last)


NAMES = (
    "grad mode", "inference mode", "autocast", "deterministic algorithms", "deterministic warn-only", "default dtype",
    "default device", "TF32", "number of threads", "backend switches",
)  # fmt: skip
"""What the values of an ``Ambient`` are, in order."""


def _read(last: _Last) -> Ambient:
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in _autocast_types if torch.is_autocast_enabled(kind)
    )
    values = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_num_threads(),
        _flags(),
    )
    last.ambient = _known.setdefault(values, Ambient(values))
    last.inference = torch.is_inference_mode_enabled()
    last.modes = _function_mode_depth()
    last.flags = _flags()
    if _torch_private.CAPABILITIES.global_state_guard:
        last.guard = _torch_private.GlobalStateGuard()
    return last.ambient
