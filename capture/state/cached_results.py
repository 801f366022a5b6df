"""What ``functools.lru_cache`` keeps: arguments and results, which no name leads to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

_MOST = 64  # entries; nobody looks into a larger cache


def misses_of(cache: Any) -> int:
    """How often the function itself ran. While this is the same no entry was added."""
    return int(cache.cache_info().misses)


def cached_in(cache: Any) -> list[Any]:
    """The arguments and results that are kept, in no order. None of a large cache."""
    if cache.cache_info().currsize > _MOST:
        return []
    own = (cache.__wrapped__, cache.__dict__)
    parts = [part for part in gc.get_referents(cache) if not any(part is one for one in own)]
    kept = [part for part in parts if type(part) is not dict and not isinstance(part, type)]
    # a cache without a limit has its results in the table, another one has links of its own there
    return kept + [part for table in parts if type(table) is dict for part in table.values()]


def keeps_these(cache: Any) -> Callable[[], bool]:
    """A function that tells whether the cache keeps what it keeps now. One that was cleared and filled again has as
    many misses, and other results."""
    kept = cached_in(cache)
    known = frozenset(map(id, kept))
    references = [weakref.ref(one) for one in kept if type(one).__weakrefoffset__]
    others = [one for one in kept if not type(one).__weakrefoffset__]  # so that no other object gets their ``id``

    def read() -> bool:
        return (
            frozenset(map(id, cached_in(cache))) == known
            and all(reference() is not None for reference in references)
            and others is not None
        )

    return read
