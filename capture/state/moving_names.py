"""Which globals of libraries move: their own code sets them anew while a body runs, as it does with counters.

A library's state is not compared before and after a run as the user's is. But names that its code may set are few, and
those that were met once are looked at before and after each later run. What moved then moves: no recording relies on
it. What stays is a setting, or is set once, where it was missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from capture.core.data import define
from capture.key.code_names import same_value


@define(eq=False)
class _Met:
    """A name that a library's code may set."""

    scope: dict[str, Any]
    moves: bool | None = None
    """None: no run came since it was met."""


_met: dict[tuple[int, str], _Met] = {}
"""By ``id`` of the globals, and name."""


def moves(scope: dict[str, Any], name: str) -> bool | None:
    """Whether a run was seen to give this global of a library another value. None: the next run tells."""
    return _met.setdefault((id(scope), name), _Met(scope)).moves


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Notes which of the names that were met hold something else after a run than before it. One that was missing, or
    None, is set once."""
    before = [(met, name, met.scope.get(name)) for (_, name), met in list(_met.items()) if not met.moves]
    try:
        yield
    finally:
        for met, name, held in before:
            met.moves = held is not None and not same_value(held, met.scope.get(name))
