"""NumPy arrays as parts of a key.

Arrays are written in place, as environments do with observations, and nothing tells when. So their content is compared
in every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from capture.key.exact import members_of_set

MOST_BYTES = 1 << 16
"""Bytes that are compared in every call (10 us). A larger array cannot be part of a key, and the call runs eagerly."""

FROZEN: dict[type, Callable[[Any], Any]] = {set: members_of_set, bytearray: bytes}
"""Other types without a hash, and what their content is compared as."""


def is_array_type(kind: type) -> bool:
    """Whether the class is NumPy's array, if NumPy is imported at all."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def content(value: Any) -> tuple[Any, ...] | None:
    """The whole content of an array, or of an object of a type in ``FROZEN``, as a hashable value. None for an array
    that is too large, holds objects, or is of a subclass that may hold more, such as a masked array."""
    kind = type(value)
    if kind in FROZEN:
        return (kind, FROZEN[kind](value))
    if kind.__name__ != "ndarray" or value.nbytes > MOST_BYTES or value.dtype.hasobject:
        return None
    return (kind, value.dtype.str, value.shape, value.strides, value.tobytes())


def is_memory_of_c(kind: type) -> bool:
    """Whether the class is made with ``ctypes``, or ``mmap``: its objects are memory that Python code reads and
    writes."""
    return type(kind).__module__ == "_ctypes" or kind.__module__ == "mmap"


def is_hash(kind: type) -> bool:
    """Whether the class is one of ``hashlib``: its objects take in more and more."""
    return kind.__module__ in _HASHES


_HASHES = frozenset({"_hashlib", "_md5", "_sha1", "_sha2", "_sha3", "_sha256", "_sha512", "_blake2"})


def digest_of(value: Any) -> str:
    """What the object of a hash has taken in."""
    digest: str = value.hexdigest() if value.digest_size else value.hexdigest(32)
    return digest


def kept_by_c(value: Any) -> dict[Any, Any] | None:
    """Objects that one made with ``ctypes`` keeps, as pointers in it lead to their memory."""
    kept = getattr(value, "_objects", None)
    return kept if type(kept) is dict else None


def windows_in(namespace: Mapping[str, Any] | None) -> list[Any]:
    """Memory that an object has among its attributes, or an attribute of its package's has: that of
    ``multiprocessing.shared_memory``, for one."""
    found = list[Any]()
    for value in () if namespace is None else namespace.values():
        if type(value) is memoryview or is_memory_of_c(type(value)):
            found.append(value)
        elif type(value).__module__ == "multiprocessing.shared_memory":
            found += windows_in(vars(value))
    return found


def memory_of_c(value: Any) -> int | None:
    """A digest of what is there; None where nothing is."""
    try:
        return hash(bytes(memoryview(value)))
    except (TypeError, ValueError, BufferError):
        return None
