"""Driver: functions of the CUDA driver library, by their C interface. A package with bindings takes 0.1 s to import."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from capture._fast import native

_LIBRARY = "libcuda.so.1"


@functools.cache
def function(name: str) -> Callable[..., int] | None:
    """A function that gives the driver's error code; None if there is no such library or function."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(_LIBRARY), name)
    except (OSError, AttributeError):
        return None
    return found


@functools.cache
def is_reached_from_c() -> bool:
    """The C module can copy and launch by itself."""
    return native is not None and bool(native.use_driver(_LIBRARY))
