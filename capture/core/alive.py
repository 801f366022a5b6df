"""Objects as long as they live, which threads ask for while others add some. A ``WeakSet`` raises there."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

Kind = TypeVar("Kind")


class Alive(Generic[Kind]):
    """In the order in which they were added."""

    def __init__(self) -> None:
        self._by_id: weakref.WeakValueDictionary[int, Kind] = weakref.WeakValueDictionary()

    def add(self, value: Kind) -> None:
        """One more."""
        self._by_id[id(value)] = value

    def discard(self, value: Kind) -> None:
        """Forget it, if it is there."""
        self._by_id.pop(id(value), None)

    def all(self) -> list[Kind]:
        """Those that are there now: a list of references is made at once, in C."""
        return [value for reference in self._by_id.valuerefs() if (value := reference()) is not None]
