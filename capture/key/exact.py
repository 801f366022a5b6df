"""Equal values of other classes, such as 1, 1.0 and True, told apart."""

from __future__ import annotations

import struct
from typing import Any

from typing_extensions import override

_PLAIN = (int, bool, bytes, type(None))


class _Hashed:
    """An object as dicts compare their keys: those of other hashes, such as two tensors, are not asked."""

    __slots__ = ("hash", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.hash = value, hash(value)

    @override
    def __hash__(self) -> int:
        return self.hash

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Hashed) or self.hash != other.hash:
            return False
        return self.value is other.value or bool(self.value == other.value)


def bits_of(value: float) -> str:
    """Tells -0.0 from 0.0, and a NaN from one of another sign, of which ``math.copysign`` and kernels make another."""
    return value.hex() if value == value else f"nan {struct.pack('<d', value).hex()}"


def float_of(bits: str) -> float:
    """The number that ``bits_of`` tells of."""
    if not bits.startswith("nan"):
        return float.fromhex(bits)
    number: float = struct.unpack("<d", bytes.fromhex(bits[3:]))[0]
    return number


def exact(value: Any) -> Any:
    """A part of a key for a hashable value, by class and bits."""
    kind = type(value)
    if kind is str:
        return value
    if kind is float:
        return (kind, bits_of(value))
    if kind is complex:
        return (kind, bits_of(value.real), bits_of(value.imag))
    if issubclass(kind, tuple):
        return (kind, *map(exact, tuple.__iter__(value)))
    if kind is frozenset:
        return (kind, frozenset(map(exact, value)))
    return (kind, value if kind in _PLAIN else _Hashed(value))


def members_of_set(value: set[Any]) -> tuple[Any, ...]:
    """The members in the order in which code meets them, which equal sets need not have in common."""
    return tuple(map(exact, value))
