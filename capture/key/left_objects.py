"""Objects that a body leaves in Python state, such as ``self.state = State(h, c)``: another one after each call.

Told by identity, each of them would make a key of its own. So what is in such a place is told by what it holds, as an
argument is. What code can have read of it is compared by guards.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from capture.core.data import frozen
from capture.key import objects, pytree
from capture.key.attributes import names_of
from capture.key.exact import exact

PlaceKey = tuple[int, Any]
"""``id`` of the object, dict or cell that keeps a value, and the value's name there; None in a cell."""
MOST_PLACES = 256
_DEEPEST = 32  # how deep objects in objects are opened
_MOST_MEMBERS = 64  # one with more is told by identity, as a list is
_KEYED = (OrderedDict, defaultdict)


@frozen(eq=False)
class Left:
    """A value in such a place, or below it."""

    value: Any


def bare(value: Any) -> Any:
    """The value itself."""
    return value.value if type(value) is Left else value


def key_of_place(holder: Any, name: Any) -> PlaceKey:
    """The key of a place, for what keeps it: for an attribute the object, or its ``__dict__``."""
    own = names_of(holder) if type(name) is str and type(holder) is not dict else None
    return id(own) if type(own) is dict and name in own else id(holder), name


def content_of(value: Any, above: tuple[int, ...], part_of: Callable[[Any], Any]) -> Any:
    """The part of a key for an object by what it holds; None for one that is told by identity. ``above``: ``id`` of
    what it is in. ``part_of``: gives the parts of members."""
    kind = type(value)
    if len(above) > _DEEPEST or not may_be_opened(value):
        return None
    if id(value) in above:
        return (kind, above.index(id(value)))
    members = _members(value)
    return None if len(members) > _MOST_MEMBERS else (kind, *[(name, part_of(member)) for name, member in members])


def may_be_opened(value: Any) -> bool:
    """Whether all that it holds can be told."""
    kind = type(value)
    return kind is deque or kind in _KEYED or (pytree.is_object(kind) and objects.is_plain(kind))


def _members(value: Any) -> list[tuple[Any, Any]]:
    """What a container or object holds, by names that are equal for equal places."""
    kind = type(value)
    if kind is deque:
        return [("maxlen", value.maxlen), *enumerate(value)]
    if kind in _KEYED:
        factory = [("factory", value.default_factory)] if kind is defaultdict else []
        return [*factory, *[(exact(key), member) for key, member in dict.items(value)]]
    return [
        (exact(at) if where == "item" else objects.suffix_of((where, at)), member)
        for (where, at), member in objects.members(value)
    ]
