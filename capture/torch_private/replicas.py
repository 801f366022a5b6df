"""The name under which ``DataParallel`` asks a module for a copy of itself; without it, none is asked for."""

from __future__ import annotations

import types
from typing import Any

import torch

_REPLICATE = "_replicate_for_data_parallel"


def replicate_uncaptured(module: torch.nn.Module) -> None:
    """Let replicas of ``module`` run the ``forward`` of its class.

    A replica is a shallow copy with tensors on another device, new in every call. The captured ``forward`` is among the
    attributes that it copies; it is bound to ``module``, and would run on that one's parameters.
    """
    if hasattr(type(module), _REPLICATE):
        replica: Any = types.MethodType(_replica, module)
        torch.nn.Module.__setattr__(module, _REPLICATE, replica)  # not as its class sets attributes for users


def _replica(module: torch.nn.Module) -> torch.nn.Module:
    replica: torch.nn.Module = getattr(type(module), _REPLICATE)(module)
    for name in ("forward", _REPLICATE):
        replica.__dict__.pop(name, None)
    return replica


_replica.__name__ = (
    _REPLICATE  # a bound method is pickled by this name: a file has the class's own, and needs no library
)
