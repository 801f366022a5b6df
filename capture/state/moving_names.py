"""Which globals of libraries move: their own code sets them anew while a body runs, as it does with counters.

A library's state is not compared before and after a run as the user's is. But names that its code may set are few, and
those that were met once are looked at before and after each later run. What moved then moves: no recording relies on
it. What stays is a setting, or is set once, where it was missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from capture.key.code_names import same_value

_met: dict[tuple[int, str], dict[str, Any]] = {}
"""By ``id`` of the globals and name, those globals."""
_moving: dict[tuple[int, str], dict[str, Any]] = {}


def moves(scope: dict[str, Any], name: str) -> bool:
    """Whether a run was seen to give this global of a library another value."""
    place = id(scope), name
    if place in _moving:
        return True
    _met[place] = scope
    return False


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Notes which of the names that were met hold something else after a run than before it. One that was missing, or
    None, is set once."""
    before = [(place, scope.get(place[1])) for place, scope in list(_met.items())]
    try:
        yield
    finally:
        for place, held in before:
            scope = _met.get(place)
            if held is not None and scope is not None and not same_value(held, scope.get(place[1])):
                _moving[place] = scope
                _met.pop(place, None)
