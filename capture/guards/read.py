"""What a watched run read: guards on all Python state that the body can have read, and the places that hold it."""

from __future__ import annotations

import contextvars
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.guards.guard import OK, Guard, Referent
from capture.key.attributes import MISSING, keeper_of, names_of, slot_of
from capture.key.code_names import NamedKey, part_of, same_value
from capture.key.input_places import InputPlace
from capture.key.module_kinds import kind_of
from capture.key.pytree import PLAIN_TYPES
from capture.native import native
from capture.state.source import Source
from capture.torch_private import capabilities

Key = tuple[int, Any]
"""``id`` of the object that keeps a value, and the value's name there."""


@frozen
class Counted:
    """Any number of this class is accepted: the body only adds to this place, or puts there what it read."""

    kind: type


@frozen
class Replaced:
    """Stands for the value of a place into which the body puts something else. What the body read there has guards
    where it was read; where no code looks the name up, any value will do."""

    before: Any


@define(eq=False)
class Place:
    """A guard on names, and the object that keeps them, by a weak reference where possible. Never changed, as a
    ``Guard``."""

    guard: Guard
    keeper: Callable[[], Any]
    counted: Collection[str] = ()
    """Names that the code only adds to: nothing depends on their values."""

    def tell_apart(self, named: NamedKey) -> list[str]:
        """Make names that have other values now a part of the key. Gives the paths of those that were not part of it
        before."""
        path = self.guard.source.path
        others = [
            (name, f"{path}.{name}") for name, old, new in self.others()
            if part_of(old) != part_of(new) and not (name in self.counted and type(new) is int)
        ]  # fmt: skip
        are_modules = self.guard.kind == "table"
        return [full for name, full in others if named.tell_apart(self.keeper, name, full, by_kind=are_modules)]

    def namespace(self) -> Any:
        """The dict that keeps the names."""
        return _own_dict(self.keeper())

    def others(self) -> list[tuple[str, Any, Any]]:
        """Names that have other values now, with the expected and the present value of each."""
        namespace = _own_dict(self.keeper())
        if namespace is None:
            return []
        expected = self.guard.expected
        pairs: list[tuple[str, Any, Any]]
        if self.guard.kind == "table":
            keys, values, kinds = expected
            return [
                (key, value, namespace[key])
                for key, value, kind in zip(keys, values, kinds, strict=True)
                if kind is None and type(key) is str and key in namespace and _differ(value, namespace[key])
            ]
        if self.guard.kind == "members":
            absent, there = expected
            pairs = [(name, value, None) for name, value in there]
        else:
            _, names, values, kinds = expected
            pairs, absent = list(zip(names, values, kinds, strict=True)), expected[0] - set(names)
        differences = [(name, MISSING, namespace[name]) for name in absent if name in namespace]
        for name, value, kind in pairs:
            now = namespace.get(name, MISSING)
            if kind is None and not same_value(now, value):
                differences.append((name, value, now))
        return differences


@define(eq=False)
class ValuePlace:
    """A guard on what no dict keeps by a name: a slot, a cell, a context variable, or the members of a small list,
    deque or set. Never changed, as a ``Guard``."""

    guard: Guard

    def keeper(self) -> Any:
        """What keeps the value."""
        return self.guard.source.holder

    def tell_apart(self, named: NamedKey) -> list[str]:
        """As ``Place.tell_apart``, where other plain values are there now."""
        source = self.guard.source
        if self.guard.kind == "value":
            expected, now = self.guard.expected, source.get()
            plain = {type(value) for value in (expected, now) if value is not MISSING} <= PLAIN_TYPES
            is_other = plain and not same_value(expected, now)
        else:
            is_other = self._has_others()
        if not is_other:
            return []
        if source.kind == "slot" and slot_of(type(source.holder), name := source.name.__name__) is source.name:
            return [source.path] if named.tell_apart(keeper_of(source.holder), name, source.path) else []
        read = source.get if self.guard.kind == "value" else self._members
        return [source.path] if named.tell_value_apart(read, source.holder, source.name, source.path) else []

    def _members(self) -> tuple[Any, ...]:
        return tuple(self.guard.source.name.__iter__(self.guard.source.holder))

    def _has_others(self) -> bool:
        (members, kinds), now = self.guard.expected, self._members()
        if len(members) != len(now) and self.guard.source.name is not set:
            return False  # it grows, or shrinks
        if self.guard.source.name is set:
            are_plain = {*map(type, (*members, *now))} <= PLAIN_TYPES
            return are_plain and (len(members) != len(now) or not all(map(same_value, members, now)))
        pairs = zip(members, kinds, now, strict=True)
        return any(kind is None and _differ(member, value) for member, kind, value in pairs)

    def namespace(self) -> None:
        """No dict keeps it."""

    def others(self) -> list[tuple[str, Any, Any]]:
        """No names have other values."""
        return []


def _differ(value: Any, now: Any) -> bool:
    """Whether two plain values differ, or two modules in their kind: those of one kind may have one recording."""
    if type(value) in PLAIN_TYPES or type(now) in PLAIN_TYPES:
        return type(value) in PLAIN_TYPES and type(now) in PLAIN_TYPES and not same_value(now, value)
    are_modules = issubclass(type(value), torch.nn.Module) and issubclass(type(now), torch.nn.Module)
    return are_modules and value is not now and kind_of(value) != kind_of(now)


def _own_dict(keeper: Any) -> Any:
    """The dict that a guard on names is about: the ``__dict__`` of an object, also of one whose class is derived from
    dict."""
    return keeper if type(keeper) is dict else names_of(keeper)


def _same_object(place: InputPlace, held: Callable[[], Any]) -> Guard | None:
    """A guard that the place has its object; None where the object is gone, or something else keeps it than a dict or
    the like."""
    value, keeper = held(), place.keeper()
    if value is None or keeper is None:
        return None
    slot = slot_of(type(keeper), place.name) if place.is_attribute else None
    if slot is not None:
        source = Source("slot", place.keeper if type(place.keeper) is weakref.ref else keeper, slot, place.path)
    elif place.is_attribute and type(place.keeper) is weakref.ref:
        source = Source("weak", place.keeper, place.name, place.path)
    elif place.is_attribute or type(keeper) is dict:
        own = keeper if type(keeper) is dict and not place.is_attribute else keeper.__dict__
        source = Source("item", own, place.name, place.path)
    elif type(keeper) is types.CellType or type(keeper) is contextvars.ContextVar:
        source = Source("closure" if type(keeper) is types.CellType else "context", keeper, None, place.path)
    elif type(keeper) is list:
        source = Source("item", keeper, place.name, place.path)
    else:
        return None
    is_weak = type(held) is weakref.ref
    return Guard("object", source, Referent.of(value)) if is_weak else Guard("value", source, value)


@define(eq=False)
class Places:
    """Guards on names, and the objects that keep the names."""

    all: list[Place | ValuePlace] = field(factory=list)
    objects: list[tuple[InputPlace, Callable[[], Any]]] = field(factory=list)
    """Places whose objects might be inputs of the call, with a function that gives the expected object while it is
    alive. A place that has another object in each call is made an input."""
    early: set[int] = field(factory=set)
    """``id`` of dicts that are guarded as a whole until the next run tells which members were looked up. The others
    tell no calls apart."""
    _guards: Callable[[Sequence[Any]], int] | None = None
    _same_objects: Callable[[Sequence[Any]], int] | None = None
    _has_all: bool = True
    """Whether ``_same_objects`` can be made: one look at all objects."""

    def others(self) -> Sequence[tuple[InputPlace, Callable[[], Any]]]:
        """Those of ``objects`` that may have another object now: none where one look in C finds all in their places."""
        if self._same_objects is None and self._has_all:
            guards = [_same_object(place, held) for place, held in self.objects]
            there = tuple([guard for guard in guards if guard is not None])
            self._has_all = len(there) == len(guards)
            self._same_objects = native.Guards(there) if self._has_all else None
        return () if self._same_objects is not None and self._same_objects(()) == OK else self.objects

    def tell_apart(self, named: NamedKey, left_out: Callable[[], Collection[int]] = tuple) -> list[str]:
        """``Place.tell_apart`` for all places. Mostly no value has changed, which the C module finds out fast.
        ``left_out``: ``id`` of dicts whose members tell no calls apart."""
        if self._guards is None:
            self._guards = native.Guards(tuple([one.guard for one in self.all]))
        if self._guards(()) == OK:
            return []
        apart = {*left_out(), *self.early}
        return [path for one in self.all if id(one.keeper()) not in apart for path in one.tell_apart(named)]


@frozen
class WalkBegin:
    """What a walk begins with. Two that are equal come to the same guards, as long as all that was read is unchanged.

    Objects are told by their ``id``: code and scopes are kept, and of the others it is known whether they are there.
    """

    codes: frozenset[tuple[int, int]]
    """Code that ran, and the scopes that it ran in."""
    starts: tuple[tuple[int, str], ...]
    others: tuple[Any, ...]
    """What else decides what a walk does."""
    run: int = field(eq=False)
    is_of_one_run: bool = field(eq=False)
    """Something is another object in each call, or nothing tells whether it is there."""
    _kept: Any = field(eq=False, repr=False)
    _references: tuple[weakref.ref[Any], ...] = field(eq=False, repr=False)

    def is_there(self) -> bool:
        """Whether all objects that it began with are alive."""
        return all(reference() is not None for reference in self._references)


@define(eq=False)
class Read:
    """Guards on all that was read, and the places that keep it."""

    guards: list[Guard] = field(factory=list)
    places: Places = field(factory=Places)
    obstacle: tuple[str, str] | None = None
    """What was read and cannot be guarded, with its path."""
    opened: frozenset[int] = frozenset()
    """``id`` of objects that the walk went into: guards of their own cover what can have been read of them."""
    tensors: set[int] = field(factory=set)
    """``id`` of all tensors that were met."""
    guarded_tensors: frozenset[int] = frozenset()
    """``id`` of the tensors among them that have guards of their own."""
    own_places: frozenset[tuple[int, str]] = frozenset()
    """Where tensors were that have guards of their own, as ``recording_guard.places_of`` gives them."""
    has_compiled: bool = False
    """Some of the code is compiled: what that looked at is known by the names in its guards alone."""
    set_only: frozenset[str] = frozenset()
    """Names that users' code sets and no code looks up."""
    begun_with: WalkBegin | None = None
    looks_up_modules: bool = False
    """Code looks up modules by names that are worked out: what it finds is another thing once more are imported."""
    is_early: bool = False
    """The next run tells more of what a library sets itself."""
    _check: Callable[[Sequence[Any]], int] | None = None

    @property
    def is_of_one_run(self) -> bool:
        """Whether only a walk for the same run may come to the same guards."""
        begin = self.begun_with
        return begin is None or begin.is_of_one_run or self.has_compiled or self.looks_up_modules

    def still_holds(self, begins_with: WalkBegin, tensors: Collection[int], places: frozenset[tuple[int, str]]) -> bool:
        """Whether another walk would come to the same guards: it begins with the same objects, and all that was read is
        unchanged. ``tensors``, ``places``: those with guards of their own, and where these are."""
        begin = self.begun_with
        if self.is_early or self.obstacle is not None or begin is None or begin != begins_with or not begin.is_there():
            return False
        if begin.run != begins_with.run and (self.is_of_one_run or begins_with.is_of_one_run):
            return False
        if self.tensors.intersection(tensors) != self.guarded_tensors or self.own_places != places:
            return False
        if self._check is None:
            self._check = native.Guards(tuple(self.guards))
        return self._check(()) == OK


_RECENT = 4  # reads of a function: a program that swaps adapters comes back to what it had before


@define(eq=False)
class RecentReads:
    """What the last watched runs of a function read, as long as a recording relies on it. What was put back, such as
    one of several adapters, is found again: the walk is saved, and its guards are kept once."""

    _kept: tuple[weakref.ref[Read], ...] = ()

    def add(self, read: Read) -> None:
        """This one is the latest."""
        others = [kept for kept in self._kept if kept() not in (None, read)]
        self._kept = (weakref.ref(read), *others[: _RECENT - 1])  # as a whole: other threads look for theirs

    def find(
        self, begin: Callable[[], WalkBegin], tensors: Collection[int], places: frozenset[tuple[int, str]]
    ) -> Read | None:  # fmt: skip
        """One that ``still_holds``. ``begin`` gives what a walk would begin with, and is asked only if any is there."""
        alive = [read for kept in self._kept if (read := kept()) is not None]
        if not alive:
            return None
        begins_with = begin()
        return next((read for read in alive if read.still_holds(begins_with, tensors, places)), None)


class OtherTensors:
    """A guard's function: tensors that no operator read still have the metadata that Python code may have looked at."""

    __slots__ = ("_same", "kinds")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._same = capabilities.metadata_check(tensors)
        self.kinds = [
            (
                type(tensor),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.device,
                tensor.requires_grad,
                tensor.is_inference(),
            )
            for tensor in tensors
        ]

    def __call__(self) -> bool:
        return self._same()
