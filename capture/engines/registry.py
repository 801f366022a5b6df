"""Which engine serves a device type. Engines are loaded with the library: a signal that ends an import in a call leaves
other threads that wait for it with half a module."""

from __future__ import annotations

from collections.abc import Callable

import torch

from capture.core import forks
from capture.engines.base import Backend
from capture.engines.cpu.engine import CpuBackend

if _has_cuda := torch.backends.cuda.is_built() and torch.version.cuda is not None:
    from capture.engines.cuda.engine import CudaBackend

_backends: dict[str, Callable[[torch.device], Backend]] = {}
_made: dict[str, Backend] = {}


def register(device_type: str, factory: Callable[[torch.device], Backend]) -> None:
    """Provide the engines for a device type; the factory gets the device.

    Raises ``ValueError`` if the type has one, or it is in use already.
    """
    if any(name.partition(":")[0] == device_type for name in _made):
        raise ValueError(f"the backend for {device_type!r} is in use; register before the first captured call")
    if device_type in _backends:
        raise ValueError(f"device type {device_type!r} has a backend already")
    _backends[device_type] = factory


def backend_for(device: torch.device) -> Backend | None:
    """The engine for a device, or None. A device without a number is the current one."""
    index: int | None = device.index  # whatever the stub says
    if device.type == "cuda" and index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    name = str(device)
    if name not in _made:
        factory = _backends.get(device.type)
        if factory is None:
            return None
        _made[name] = factory(device)
    return _made[name]


@forks.in_child
def _leave_to_parent() -> None:
    """A device that a process has used is of no use to a child that it forks: bodies run there as they are, and torch
    says so."""
    for backend in _made.values():
        if backend.has_own_memory:
            backend.in_capture = _always  # type: ignore[method-assign]


def _always() -> bool:
    return True


register("cpu", lambda _: CpuBackend())
if _has_cuda:
    register("cuda", lambda device: CudaBackend(device))
