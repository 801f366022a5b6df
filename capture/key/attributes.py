"""Where an object keeps its own attributes, in its ``__dict__`` or in slots of its class, and a container its members.

All that reads, notes, guards or writes one of them finds its place here. No code of the class runs.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from capture.key.tensor_kind import PLAIN_TYPES
from capture.native import native

HEAP, IMMUTABLE = 1 << 9, 1 << 8
"""Flags of classes: made while the process runs, as by a ``class`` statement, and immutable. From Python 3.12 on those
of ``itertools`` have both."""


class _Missing:
    """Stands for an attribute or name that does not exist."""

    @override
    def __repr__(self) -> str:
        return "(absent)"


MISSING = _Missing()
_MOST_PLACES = 64  # as many members of a container as the key has by value
Slot = types.MemberDescriptorType
PROXIES = frozenset(weakref.ProxyTypes)


def slot_of(kind: type, name: Any) -> Slot | None:
    """The slot that a look-up of the name finds in objects of the class: before what their ``__dict__`` has by this
    name. None where the class has no slot by the name, or something else comes first, such as a property."""
    for base in kind.__mro__:
        if name in base.__dict__:
            held = base.__dict__[name]
            return held if type(held) is Slot and _has_slots(base) else None
    return None


def slots_of(kind: type) -> Iterator[tuple[str, Slot, bool]]:
    """All slots of the objects of a class, by name, and whether a look-up of the name finds the slot: a property or
    another slot may come first."""
    for base in kind.__mro__[:-1]:
        if _has_slots(base):
            for name, held in base.__dict__.items():
                if type(held) is Slot:
                    yield name, held, slot_of(kind, name) is held


def _has_slots(base: type) -> bool:
    """Whether a ``class`` statement may have made slots. What classes in C have by such descriptors is no attribute
    that users set."""
    return base.__flags__ & (HEAP | IMMUTABLE) == HEAP and "__slots__" in base.__dict__


def in_slot(slot: Slot, holder: Any) -> Any:
    """What an object has in a slot, or ``MISSING``."""
    try:
        return slot.__get__(holder, type(holder))
    except AttributeError:
        return MISSING


def dict_of(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, without running what a class may define for it."""
    own = native.own_dict(value)
    return own if type(own) is dict else None


def names_of(value: Any) -> Any:
    """What an object, a class or a module has by name in its ``__dict__``; None where it has none. As ``dict_of``, also
    where that is another mapping than a plain dict, and of what a weak proxy stands for."""
    if type(value) in PROXIES:
        value = native.referent(value)
    return type.__getattribute__(value, "__dict__") if issubclass(type(value), type) else native.own_dict(value)


def is_descriptor(value: Any) -> bool:
    """Whether a class that has this for a name gives something else, such as a property or a method."""
    return any("__get__" in kind.__dict__ for kind in type(value).__mro__)


def value_in_c(holder: Any, name: str) -> Any:
    """What C code keeps for an object by a name that it does not have itself; or what its class has, if no code of
    users is needed to get that. ``MISSING``: neither."""
    for kind in type(holder).__mro__:
        if name in kind.__dict__:
            held = kind.__dict__[name]
            if type(held) in (types.GetSetDescriptorType, types.MemberDescriptorType):
                return held.__get__(holder, type(holder))
            return MISSING if is_descriptor(held) else held
    return MISSING


def own_value(holder: Any, name: Any) -> Any:
    """What an object, a class or a module itself keeps by the name, or ``MISSING``."""
    slot = slot_of(type(holder), name)
    if slot is not None:
        return in_slot(slot, holder)
    own = names_of(holder)
    return MISSING if own is None else own.get(name, MISSING)


def put_own(holder: Any, name: Any, value: Any) -> None:
    """Have an object keep this by the name; ``MISSING``: nothing."""
    slot = slot_of(type(holder), name)
    if slot is not None:
        put_in_slot(slot, holder, value)
    elif issubclass(type(holder), type):
        if value is not MISSING:
            type.__setattr__(holder, name, value)
        elif name in holder.__dict__:
            type.__delattr__(holder, name)
    elif value is not MISSING:
        names_of(holder)[name] = value
    else:
        names_of(holder).pop(name, None)


def put_in_slot(slot: Slot, holder: Any, value: Any) -> None:
    """Have this in a slot; ``MISSING``: nothing."""
    if value is not MISSING:
        slot.__set__(holder, value)
    elif in_slot(slot, holder) is not MISSING:
        slot.__delete__(holder)


def weak_or_none(value: Any) -> weakref.ref[Any] | None:
    """A weak reference, where the class of the object has those."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def keeper_of(value: Any) -> Callable[[], Any]:
    """Gives the object, or None once it is gone. One that takes no weak reference is kept."""
    return weak_or_none(value) or functools.partial(_itself, value)


def _itself(value: Any) -> Any:
    return value


def plain_class(container: Any) -> Any:
    """What a container is of Python's own: a class of the user's may do more with a member."""
    for kind in type(container).__mro__[:-1]:
        if type.__getattribute__(kind, "__module__") in ("builtins", "collections"):
            return kind
    return type(container)


def item_of(container: Any, name: Any) -> Any:
    """The member that a container has by this key or at this index, without what its class may do more: a
    ``__missing__`` puts a member there. ``MISSING``, or one of the usual errors of look-ups, where there is none."""
    if issubclass(type(container), dict):
        return dict.get(container, name, MISSING)
    return plain_class(container).__getitem__(container, name)


def has_places(container: deque[Any]) -> bool:
    """Whether each member of a deque has a place, as in a list: in a window of frames, for one. Of numbers alone, and
    of very many members, all are compared as a whole: an append to a full deque moves each of them."""
    members = deque.__len__(container)
    return members <= _MOST_PLACES and not all(type(one) in PLAIN_TYPES for one in deque.__iter__(container))


def is_unordered(container: Any) -> bool:
    """Whether it is a set, or a deque whose members have no places."""
    kind = type(container)
    return issubclass(kind, (set, frozenset)) or (issubclass(kind, deque) and not has_places(container))


def keys_of(container: Any) -> tuple[Any, ...]:
    """Keys of a dict, members of a set or of a deque without places, positions of a list, a tuple and another deque; of
    a class that Python code derived, as Python's own class has them."""
    plain = plain_class(container)
    if issubclass(type(container), dict) or is_unordered(container):
        return tuple(plain.__iter__(container))
    return tuple(range(plain.__len__(container)))
