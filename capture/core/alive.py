"""A collection of weakly held objects that several threads read and change at once. A ``WeakSet`` raises if one thread
changes it while another iterates over it."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Alive(Generic[Kind]):
    """Weak references to objects, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, Kind] = weakref.WeakValueDictionary()

    def add(self, value: Kind) -> None:
        """Add an object."""
        self._by_id[id(value)] = value

    def discard(self, value: Kind) -> None:
        """Remove an object, if it is there."""
        self._by_id.pop(id(value), None)

    def all(self) -> list[Kind]:
        """The objects that are alive now. The references are copied by one call into C, which no other thread can
        interrupt."""
        return [value for reference in self._by_id.valuerefs() if (value := reference()) is not None]
