"""Which keys code looked up in dicts of which it reads nothing else (``key.keyed_names``).

A registry, such as the table of all loggers, has members that a body has nothing to do with, and gets more of them. The
walk for read guards asks for the keys where it comes to such a dict. Frames of the code that looks them up are then
looked at in each run, as they begin.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Collection
from typing import Any

from capture.key.keyed_names import keyed_names
from capture.key.pytree import PLAIN_TYPES

_asked: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
_MOST_KEYS = 64  # so many keys of one dict are told apart


class Early(enum.Enum):
    """The next run tells the keys."""

    EARLY = enum.auto()


EARLY = Early.EARLY

Seen = dict[types.CodeType, set[Any]]
"""By code, the arguments that were keys."""


def asked() -> Collection[types.CodeType]:
    """Code whose frames are looked at."""
    return frozenset(_asked)


def note(frame: types.FrameType, seen: Seen) -> None:
    """A frame of such code begins."""
    code, values = frame.f_code, frame.f_locals
    known = seen.setdefault(code, set())
    for keys in keyed_names(code).values():
        for name in keys.arguments:
            value = values.get(name)
            known.add(value if type(value) in _KEYS else _UNKNOWN)


def keys_of(
    name: str, codes: Collection[types.CodeType], seen: Seen, looked_at: Collection[types.CodeType]
) -> frozenset[Any] | Early | None:
    """The keys that this code looked up in the dict that it calls by this name. None where it does more with it.
    ``EARLY`` where frames have not told yet, as they were not in ``looked_at``: in the next run they will."""
    known = {code: keys for code in codes if (keys := keyed_names(code).get(name)) is not None}
    by_arguments = {code for code, keys in known.items() if keys.arguments}
    _asked.update(by_arguments)
    if len(known) < len(codes):
        return None
    if missing := by_arguments - seen.keys():
        return None if missing <= set(looked_at) else EARLY
    found = frozenset[Any]().union(*[seen.get(code, set()) | keys.constants for code, keys in known.items()])
    return found if _UNKNOWN not in found and len(found) <= _MOST_KEYS else None


_KEYS = PLAIN_TYPES & {str, int, bool, type(None)}
_UNKNOWN = object()
