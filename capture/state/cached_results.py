"""What ``functools.lru_cache`` keeps: arguments and results, which no name leads to."""

from __future__ import annotations

import gc
import weakref
from typing import Any

_MOST = 64  # entries; nobody looks into a larger cache


def misses_of(cache: Any) -> int:
    """How often the function itself ran. While this is the same no entry was added."""
    return int(cache.cache_info().misses)


def cached_in(cache: Any) -> list[Any]:
    """The arguments and results that are kept, in no order. None of a large cache."""
    if cache.cache_info().currsize > _MOST:
        return []
    own = {id(cache.__wrapped__), id(cache.__dict__)}
    parts = [part for part in gc.get_referents(cache) if id(part) not in own]
    kept = [part for part in parts if type(part) is not dict and not isinstance(part, type)]
    # a cache without a limit has its results in the table, another one has links of its own there
    return kept + [part for table in parts if type(table) is dict for part in table.values()]


class KeepsThese:
    """A guard's function: the cache keeps what it kept when this was made. One that was cleared and filled again has as
    many misses, and other results."""

    __slots__ = ("_known", "_others", "_references", "cache")

    def __init__(self, cache: Any) -> None:
        kept = cached_in(cache)
        self.cache = cache
        self._known = frozenset(map(id, kept))
        self._references = [weakref.ref(one) for one in kept if type(one).__weakrefoffset__]
        self._others = [one for one in kept if not type(one).__weakrefoffset__]  # no other object gets their ``id``

    def __call__(self) -> bool:
        return frozenset(map(id, cached_in(self.cache))) == self._known and all(
            reference() is not None for reference in self._references
        )

    def is_like(self, other: KeepsThese) -> bool:
        """Whether it is about the same cache, with the same in it."""
        return self.cache is other.cache and self._known == other._known and self()
