"""How C opens the containers of a call: nodes that lead to the same leaves as the key's (``native/opened.c``)."""

from __future__ import annotations

import enum
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.key import objects, pytree
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import LeftOut, is_told_by_identity

_LEAVES = PLAIN_TYPES - {slice, torch.Size} | {torch.Tensor, torch.nn.Parameter}
_NOT_SET = ...
_MOST_CONTAINERS = 64  # as many as C tells apart in one call
Opened = tuple[Any, ...] | None
"""A node of the C module: for a container, or None for a value inside of one."""


class _NotInC(Exception):
    """A value that C cannot open in the way in which the key does."""


class ById(tuple[weakref.ref[Any], weakref.ref[type]]):
    """An object that the key tells by identity: weak references to it and to its class."""

    __slots__ = ()


NUMBER = int
"""Stands for a number that is an input of its own. No value is this class: classes are told by identity."""


@define(eq=False)
class _Opening:
    """One call's values, as they are opened."""

    left_out: Collection[LeftOut]
    found: list[Any] = field(factory=list)
    met: dict[int, int] = field(factory=dict)
    """By ``id``, the number of each object that counts once, in the order in which C meets them."""

    def meet(self, value: Any) -> None:
        """It is met for the first time."""
        if id(value) in self.met or len(self.met) == _MOST_CONTAINERS:
            raise _NotInC
        self.met[id(value)] = len(self.met)


def opened_values(
    values: Sequence[Any], leaves: Sequence[Any], left_out: Collection[LeftOut] = ()
) -> tuple[tuple[Opened, ...], tuple[Any, ...]] | None:  # fmt: skip
    """Nodes of the values, and what is in them; None where C cannot open one of them as the key does, whose dynamic
    leaves are ``leaves``. ``left_out``: as in the key."""
    opening = _Opening(left_out)
    try:
        nodes = tuple([_node(value, opening) for value in values])
    except (_NotInC, RecursionError):
        return None
    tensors = [leaf for leaf in opening.found if issubclass(type(leaf), torch.Tensor)]
    if len(tensors) != len(leaves) or any(tensor is not leaf for tensor, leaf in zip(tensors, leaves, strict=True)):
        return None
    return nodes, tuple(opening.found)


def _node(value: Any, opening: _Opening) -> Opened:
    kind = type(value)
    if kind in _LEAVES:
        opening.found.append(value)
        return None
    if kind in pytree.CHANGEABLE:
        opening.meet(value)
    if kind is weakref.ref:
        return (kind, _number_of(value(), opening), None, None, None, False)
    if kind in (tuple, list) or (pytree.is_namedtuple(kind) and not pytree.is_registered(kind)):
        members = [_member(value, ("item", at), member, opening) for at, member in enumerate(value)]
        return (kind, tuple(members), None, None, None, kind is list)
    if kind in (dict, defaultdict):
        return (kind, None, _part(value, "item", value.items(), opening), None, None, True)
    if issubclass(kind, (type, enum.Enum)) or is_told_by_identity(value):
        opening.found.append(_by_id(value))
        return None
    is_object = pytree.is_object(kind) and objects.is_plain(kind) and not pytree.is_registered(kind)
    if not is_object or objects.is_own_dict(value) or _has_class_defaults(value):
        raise _NotInC
    opening.meet(value)
    return _object_node(value, opening)


def _number_of(value: Any, opening: _Opening) -> int:
    """Of what a weak reference refers to, which was met, as an object is that its parts lead back to."""
    if id(value) not in opening.met:
        raise _NotInC
    return opening.met[id(value)]


def _member(holder: Any, name: Any, member: Any, opening: _Opening) -> Opened:
    if (id(holder), name) in opening.left_out:
        opening.found.append(NUMBER)
        return None
    return _node(member, opening)


def _by_id(value: Any) -> ById:
    try:
        return ById((weakref.ref(value), weakref.ref(type(value))))
    except TypeError:
        raise _NotInC from None


def _has_class_defaults(value: Any) -> bool:
    """Whether the key has fields of the class, which the object does not have itself."""
    own = vars(value) if type(value).__dictoffset__ else {}
    return any(name not in own and name in type(value).__dict__ for name in pytree.field_names(type(value)) or ())


def _object_node(value: Any, opening: _Opening) -> Opened:
    members = objects.members(value)
    of_dict, of_list = issubclass(type(value), dict), issubclass(type(value), list)
    items = [(at, member) for (where, at), member in members if where == "item"]
    in_list = tuple([_member(value, ("item", at), one, opening) for at, one in items]) if of_list else None
    in_dict = _part(value, "item", items, opening) if of_dict else None
    slots = _slots(value, {at: member for (where, at), member in members if where == "slot"}, opening)
    attributes = [(at, member) for (where, at), member in members if where == "attribute"]
    own = _part(value, "attribute", attributes, opening) if type(value).__dictoffset__ else None
    return (type(value), in_list, in_dict, slots, own, True)


def _part(holder: Any, kind: str, pairs: Iterable[tuple[Any, Any]], opening: _Opening) -> tuple[Any, Any]:
    pairs = list(pairs)
    if not all(_is_plain(name) for name, _ in pairs):
        raise _NotInC
    nodes = [_member(holder, (kind, name), member, opening) for name, member in pairs]
    return tuple([name for name, _ in pairs]), tuple(nodes)


def _is_plain(name: Any) -> bool:
    """Whether C compares it by value, as the types of an edge of a graph."""
    return all(map(_is_plain, name)) if type(name) is tuple else type(name) in PLAIN_TYPES


def _slots(value: Any, there: dict[Any, Any], opening: _Opening) -> tuple[Any, Any] | None:
    slots = objects.slots_of(type(value))
    if any(one not in slots for one in there):  # a slot of C's own, such as the factory of a ``defaultdict``
        raise _NotInC
    nodes = [_member(value, ("slot", slot), there[slot], opening) if slot in there else _NOT_SET for slot in slots]
    return (slots, tuple(nodes)) if slots else None
