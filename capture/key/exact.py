"""Equal values of other classes, such as 1, 1.0 and True, told apart."""

from __future__ import annotations

from typing import Any


def exact(value: Any) -> Any:
    """A part of a key for a hashable value, by class and bits."""
    kind = type(value)
    if kind is str:
        return value
    if kind is float:
        return (kind, value.hex())
    if kind is complex:
        return (kind, value.real.hex(), value.imag.hex())
    if issubclass(kind, tuple):
        return (kind, *map(exact, tuple.__iter__(value)))
    return (kind, frozenset(map(exact, value)) if kind is frozenset else value)


def members_of_set(value: set[Any]) -> tuple[Any, ...]:
    """The members in the order in which code meets them, which equal sets need not have in common."""
    return tuple(map(exact, value))
