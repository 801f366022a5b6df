"""NumPy arrays as parts of a key. They are written in place, as environments do with observations, and nothing tells of
such writes: what is compared is the content."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

MOST_BYTES = 1 << 16
"""Compared in every call (10 us); a larger array is no part of a key, and the call runs eagerly."""

FROZEN: dict[type, Callable[[Any], Any]] = {set: frozenset, bytearray: bytes}
"""Of other types that have no hash: what their content is compared as."""


def is_array_type(kind: type) -> bool:
    """An array of NumPy's, if anybody has imported it."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def content(value: Any) -> tuple[Any, ...] | None:
    """All that an array, or an object of a type in ``FROZEN``, is now. None for an array that is too large, holds
    objects, or is of a type that may hold more, as a masked one does."""
    kind = type(value)
    if kind in FROZEN:
        return (kind, FROZEN[kind](value))
    if kind.__name__ != "ndarray" or value.nbytes > MOST_BYTES or value.dtype.hasobject:
        return None
    return (kind, value.dtype.str, value.shape, value.strides, value.tobytes())
