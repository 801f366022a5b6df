"""Driver: functions of the CUDA driver library, by their C interface. A package with bindings takes 0.1 s to import."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def function(name: str) -> Callable[..., int] | None:
    """A function that gives the driver's error code; None if there is no such library or function."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    return found
