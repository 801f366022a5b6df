"""Same state: other objects took the places of those that a recording was made with, and are like them.

An adapter or a schedule that is swapped is another object with other tensors. A body treats it as the one before if all
that it can have read there is equal, except that the tensors lie elsewhere. Then the guards made of it are the same
list, with other objects in the same places, and the recording is right for it once it is pointed at the tensors.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Container, Sequence, Set
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.guards.guard import OK, OVERLAPS, Guard, Referent
from capture.guards.read import OtherTensors
from capture.guards.read_guards import read_by, starts_of
from capture.guards.read_walk import CLOSED
from capture.guards.recording_guard import RecordingGuard, StaticOwner, add_owner, kind_of
from capture.key.attributes import HEAP, IMMUTABLE
from capture.key.code_names import same_value
from capture.key.packages import module_of, package_of
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES
from capture.state import snapshot
from capture.state.cached_results import KeepsThese
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.source import Source

_CONTAINERS = (list, dict, set, OrderedDict)
_BY_C = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, types.BuiltinFunctionType,
)  # fmt: skip


@define(eq=False)
class _Pairs:
    """Pairs of objects, of the old and of the new state, that are in the same places: one to one."""

    opened: Container[int]
    """``id`` of objects of the new state that guards were made of, too."""
    _others: dict[int, Any] = field(factory=dict)
    _back: dict[int, Any] = field(factory=dict)

    def is_pair(self, recorded: Any, current: Any) -> bool:
        """Whether both are in the same places. A container or object is no plain value: its members are compared."""
        if type(recorded) is not type(current):
            return False
        if type(recorded) is tuple:
            return len(recorded) == len(current) and all(map(self.is_pair, recorded, current))
        if issubclass(type(recorded), weakref.ref):
            recorded, current = recorded(), current()
        if recorded is None or current is None:
            return recorded is current
        return (
            self._others.setdefault(id(recorded), current) is current
            and self._back.setdefault(id(current), recorded) is recorded
        )

    def is_same(self, recorded: Any, current: Any) -> bool:
        """Whether the new value may take the place of the old one."""
        kind = type(recorded)
        if kind is not type(current):
            return False
        if kind in PLAIN_TYPES:
            return same_value(recorded, current)
        if kind in (tuple, Referent):
            return len(recorded) == len(current) and all(map(self.is_same, recorded, current))
        if kind is frozenset and all(type(name) is str for name in (*recorded, *current)):
            return bool(recorded == current)
        if issubclass(kind, weakref.ref):
            referents = recorded(), current()
            return None not in referents and self.is_same(*referents)
        return (recorded is current or self._may_replace(recorded, current)) and self.is_pair(recorded, current)

    def _may_replace(self, recorded: Any, current: Any) -> bool:
        kind = type(recorded)
        if kind in TENSOR_TYPES:
            return kind_of(recorded) == kind_of(current)
        if id(current) not in self.opened:
            return False
        if kind in _CONTAINERS:
            return True
        made_in_python = all(map(_is_made_in_python, kind.__mro__[:-1])) and not issubclass(kind, type)
        return made_in_python and package_of(module_of(kind)) not in CLOSED

    def are_same_guards(self, recorded: Guard, current: Guard) -> bool:
        """Whether both lists of guards ask for the same of what is in the same places."""
        at, there = recorded.source, current.source
        if (recorded.kind, recorded.verdict, at.kind, at.path) != (
            current.kind,
            current.verdict,
            there.kind,
            there.path,
        ):
            return False
        if at.name is not there.name and not (type(at.name) is type(there.name) is str and at.name == there.name):
            return False
        if at.kind == "call":
            return self._are_same_calls(at.holder, there.holder) and self.is_same(recorded.expected, current.expected)
        if not self.is_pair(at.holder, there.holder):
            return False
        if recorded.kind == "classes":
            return self.is_same(recorded.expected[0], current.expected[0]) and self.is_pair(
                recorded.expected[1], current.expected[1]
            )
        return self.is_same(recorded.expected, current.expected)

    def _are_same_calls(self, recorded: Any, current: Any) -> bool:
        if type(recorded) is OtherTensors is type(current):
            return bool(recorded.kinds == current.kinds)
        if type(recorded) is KeepsThese is type(current):
            return recorded.is_like(current)
        if type(recorded) is functools.partial is type(current) and not (recorded.keywords or current.keywords):
            return recorded.func is current.func and self.is_same(recorded.args, current.args)
        return recorded is current


def _is_made_in_python(kind: type) -> bool:
    """Whether its objects keep attributes and slots alone: no guard covers what a class written in C keeps besides."""
    slots = {"__dict__", "__weakref__", *_texts(kind.__dict__.get("__slots__", ()))}
    by_c = [name for name, value in kind.__dict__.items() if isinstance(value, _BY_C) and name not in slots]
    return kind.__flags__ & (HEAP | IMMUTABLE) == HEAP and not by_c


def _texts(slots: Any) -> tuple[str, ...]:
    return (slots,) if type(slots) is str else tuple([slot for slot in slots if type(slot) is str])


def _are_same(one: RecordingGuard, other: RecordingGuard) -> bool:
    pairs = _Pairs(other.opened)
    return len(one.structure) == len(other.structure) and all(
        map(pairs.are_same_guards, one.structure, other.structure)
    )


def in_place_of(
    guard: RecordingGuard, call: Call, ran: CodeRun, leaves: Sequence[Any], latest: RecordingGuard | None
) -> RecordingGuard | None:
    """The guards of this recording for the present state, in which other objects took the places of equal ones. None
    where more than that differs. ``latest``: the guards of another recording of the same function."""
    if guard.is_its_own or guard.asks_who:
        return None
    starts = tuple([id(start) for start, _ in starts_of(call)])
    if latest is not None and _is_current(latest, guard, starts, leaves) and _are_same(guard, latest):
        return latest.copy(guard.copied)
    state = snapshot.snapshot(call.roots())
    owners = _owners(guard, state, {path for path, _ in call.paths()})
    if owners is None:
        return None
    made = RecordingGuard(
        ran=guard.ran, asks_who=guard.asks_who, lookups=guard.lookups, starts=starts, written=guard.written
    )
    made.copied, made.watched, made.arguments = guard.copied, guard.watched, list(guard.arguments)
    seen: set[str] = set()
    for path, places in owners:
        add_owner(made, state, path, places, set(), seen)
    tensors = {id(owner.tensor) for owner in made.owners} | {id(leaf) for leaf in leaves}
    read = read_by(ran, call, (), (), tensors, state)
    made.structure += read.guards
    made.places, made.opened = read.places, read.opened
    if read.obstacle is not None or not _are_same(guard, made):
        return None
    made.settle(leaves)
    return made


def _is_current(latest: RecordingGuard, guard: RecordingGuard, starts: tuple[int, ...], leaves: Sequence[Any]) -> bool:
    """Whether ``latest`` covers what ``guard`` covers, and holds now."""
    same = (latest.starts, latest.watched, bool(latest.copied)) == (starts, guard.watched, bool(guard.copied))
    return (
        latest is not guard
        and same
        and not latest.is_its_own
        and guard.ran <= latest.ran
        and (guard.asks_who, guard.lookups) == (latest.asks_who, latest.lookups)
        and [_places(owner) for owner in latest.owners] == [_places(owner) for owner in guard.owners]
        and [(argument.position, argument.path) for argument in latest.arguments]
        == [(argument.position, argument.path) for argument in guard.arguments]
        and latest.check(leaves) in (OK, OVERLAPS)
    )


def _places(owner: StaticOwner) -> list[str]:
    return [owner.path, *(source.path for source in owner.sources)]


def _owners(
    guard: RecordingGuard, state: snapshot.Snapshot, arguments: Set[str]
) -> list[tuple[str, list[tuple[Source, torch.Tensor]]]] | None:
    """Where the tensors are now that took the places of the recording's: in the same places, and in no others."""
    owners = []
    for owner in guard.owners:
        places = [state.sources.get(source.path) for source in owner.sources]
        tensor = places[0][1] if places and places[0] is not None else None
        if not isinstance(tensor, torch.Tensor) or kind_of(tensor) != guard.kinds[owner.path]:
            return None
        every = {owner_source.path for owner_source, _ in state.owners(tensor.untyped_storage())} - arguments
        if every != {source.path for source in owner.sources} or any(
            place is None or place[1] is not tensor for place in places
        ):
            return None
        owners.append((owner.path, [place for place in places if place is not None]))
    return owners
