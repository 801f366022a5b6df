"""What was read: guards on all that a body can have read of Python state, and the places that keep it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from capture.guards.guard import OK, Guard
from capture.key.code_names import MISSING, NamedKey, part_of, same_value
from capture.key.input_places import InputPlace
from capture.native import native
from capture.torch_private import capabilities

Key = tuple[int, Any]
"""``id`` of what keeps a value, and the name there."""


@frozen
class Counted:
    """Stands for any number of this class, in a place that the body only adds to."""

    kind: type


@frozen
class Replaced:
    """Stands for what was where the body put a new object, as it always does. It counts where it was read."""

    before: Any


@define(eq=False)
class Place:
    """A guard on names, and who keeps them: told weakly where that is possible. Never changed, as a ``Guard``."""

    guard: Guard
    keeper: Callable[[], Any]
    counted: Collection[str] = ()
    """Names that code only adds to: whatever their values were, nothing followed from them."""

    def tell_apart(self, named: NamedKey) -> list[str]:
        """Make names that have other values a part of the key. Gives the paths of those that were none before."""
        path = self.guard.source.path
        others = [
            (name, f"{path}.{name}") for name, old, new in self.others()
            if part_of(old) != part_of(new) and not (name in self.counted and type(new) is int)
        ]  # fmt: skip
        return [full for name, full in others if named.tell_apart(self.keeper, name, full)]

    def own(self) -> Any:
        """The dict that keeps the names."""
        return _own_dict(self.keeper())

    def others(self) -> list[tuple[str, Any, Any]]:
        """Names that have other values now, with those then and now."""
        own = _own_dict(self.keeper())
        if own is None:
            return []
        expected = self.guard.expected
        pairs: list[tuple[str, Any, Any]]
        if self.guard.kind == "members":
            absent, there = expected
            pairs = [(name, value, None) for name, value in there]
        else:
            _, names, values, kinds = expected
            pairs, absent = list(zip(names, values, kinds, strict=True)), expected[0] - set(names)
        differences = [(name, MISSING, own[name]) for name in absent if name in own]
        for name, value, kind in pairs:
            now = own.get(name, MISSING)
            if kind is None and not same_value(now, value):
                differences.append((name, value, now))
        return differences


def _own_dict(keeper: Any) -> Any:
    """What a guard on names is about: an object's ``__dict__``, also of one that is a dict of a class of its own."""
    return keeper if type(keeper) is dict else getattr(keeper, "__dict__", None)


@define(eq=False)
class Places:
    """Guards on names, and who keeps them."""

    all: list[Place] = field(factory=list)
    objects: list[tuple[InputPlace, Callable[[], Any]]] = field(factory=list)
    """Where objects are kept that might be inputs, and what gives those objects while they are there: another one in
    each call makes them such."""
    _guards: Callable[[Sequence[Any]], int] | None = None

    def tell_apart(self, named: NamedKey) -> list[str]:
        """See `Place.tell_apart`. Most often nothing is another value, which the C module sees."""
        if self._guards is None:
            self._guards = native.Guards(tuple([one.guard for one in self.all]))
        if self._guards(()) == OK:
            return []
        return [path for one in self.all for path in one.tell_apart(named)]


@define(eq=False)
class Read:
    """Guards on all that was read, and the places that keep it."""

    guards: list[Guard] = field(factory=list)
    places: Places = field(factory=Places)
    obstacle: tuple[str, str] | None = None
    """What was read and cannot be guarded, and its path."""
    opened: frozenset[int] = frozenset()
    """``id`` of objects that were gone into: what can have been read of them is in guards of its own."""
    tensors: set[int] = field(factory=set)
    """``id`` of all tensors that were met."""
    own: frozenset[int] = frozenset()
    """Those of them that have guards of their own."""
    begun_with: tuple[Any, ...] = ()
    """What the walk began with: ``read_guards.begins_with``."""

    def still_holds(self, begins_with: tuple[Any, ...], tensors: Collection[int]) -> bool:
        """Another walk would find the same guards: it begins with the same, and all that was read is as it was."""
        if self.obstacle is not None or self.begun_with != begins_with:
            return False
        return self.tensors.intersection(tensors) == self.own and native.Guards(tuple(self.guards))(()) == OK


class OtherTensors:
    """Tensors that no operator read have the metadata that they had: Python code may look at it."""

    __slots__ = ("_same", "kinds")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._same = capabilities.metadata_check(tensors)
        self.kinds = [
            (type(one), one.dtype, one.shape, one.stride(), one.device, one.requires_grad, one.is_inference())
            for one in tensors
        ]

    def __call__(self) -> bool:
        return self._same()
