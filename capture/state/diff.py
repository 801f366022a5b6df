"""Changes: what a body left behind in the Python objects it can reach."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from capture import _containers
from capture._containers import PLAIN_TYPES
from capture._named import MISSING
from capture._places import Place, are_as_they_were
from capture._state import CLOSED, Change, Snapshot, closed_package, function_places, module_places


def changes(before: Snapshot) -> list[Change]:
    """What differs now from ``before``: other values at known places, members and attributes come or gone."""
    found = []
    same = _unchanged_modules(before)
    filled = _filled(before)
    for place, old in before.places.values():
        if id(place.parent) in same:
            continue
        new = place.get()
        if new is not old and not _equal_plain(filled.get(id(old), old), new):
            found.append(Change(place, old, new))
        elif new is not old:
            before.rebuilt.add(place.path)
    for place, holder in before.entered:
        if id(place) not in same:
            found.extend(_new_attributes(before, place, holder))
    for place, container, members in before.members:
        now = _member_keys(container)
        if id(container) in filled and place.path in before.rebuilt:
            continue  # it took other members, and an equal one of those before stands in its place
        if not _same_members(now, members) and not any(change.place is place for change in found):
            found.extend(_new_members(place, container, members, now))
    return found


def _filled(before: Snapshot) -> dict[int, Any]:
    """By ``id`` of a list or dict that has other members now: one with those it had."""
    found: dict[int, Any] = {}
    for place, container, members in before.members:
        if isinstance(container, (list, dict)) and not _same_members(_member_keys(container), members):
            paths = member_paths(place, container, members)
            if all(path in before.places for path in paths):  # else it has more than a walk looks at
                values: Any = [before.places[path][1] for path in paths]
                if isinstance(container, dict):
                    values = dict(zip(members, values, strict=True))
                found[id(container)] = values
    return found


def member_paths(place: Place, container: Any, members: tuple[Any, ...]) -> list[str]:
    """Paths of a container's members, by their keys."""
    if isinstance(container, dict):
        return [f"{place.path}.{key if isinstance(key, str) else index}" for index, key in enumerate(members)]
    return [f"{place.path}.{index}" for index in range(len(members))]


def _new_members(place: Place, container: Any, before: tuple[Any, ...], now: tuple[Any, ...]) -> list[Change]:
    """A dict that only got more members, by names, has a place for each; of all else as much is told as that it
    changed."""
    count, more = len(before), now[len(before) :]
    if isinstance(container, dict) and _same_members(now[:count], before) and all(type(key) is str for key in more):
        places = [Place("item", container, key, f"{place.path}.{key}", place) for key in more]
        return [Change(one, MISSING, container[one.name]) for one in places]
    return [Change(place, f"{count} members", f"{len(now)} members", container=True)]


def _unchanged_modules(before: Snapshot) -> set[int]:
    """``id`` of the places of modules all of whose members are what they were: those need not be looked at singly."""
    if any(len(function_places(f, None)) != number for f, number in before.forwards.items()):
        return set()
    return {id(place) for place, tables in before.tables if are_as_they_were(tables)}


def _member_keys(container: Any) -> tuple[Any, ...]:
    keyed = isinstance(container, (set, frozenset, deque, dict))
    return tuple(container) if keyed else tuple(range(len(container)))


def _same_members(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a is b or (type(a) in (int, str) and a == b) for a, b in pairs)


def _new_attributes(before: Snapshot, place: Place, holder: Any) -> list[Change]:
    if isinstance(holder, (types.FunctionType, torch.Tensor, *CLOSED)) or place.get() is not holder:
        return []
    path = place.path
    if isinstance(holder, torch.nn.Module):
        now = module_places(holder, place)
    elif closed_package(type(holder).__module__):
        return []
    else:
        now = [(one, one.get()) for one in (Place("attribute", holder, name, f"{path}.{name}", place)
               for name in getattr(holder, "__dict__", {}) if not name.startswith("__"))]  # fmt: skip
    return [Change(new, MISSING, value) for new, value in now if new.path not in before.places]


def _equal_plain(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if type(old) in PLAIN_TYPES or isinstance(old, types.MethodType):
        return bool(old == new) or (old != old and new != new)
    if isinstance(old, tuple) or type(old) in (list, dict, OrderedDict, defaultdict):
        pairs = list(zip(_containers.leaves(old), _containers.leaves(new), strict=False))
        same_size = sum(1 for _ in _containers.leaves(old)) == sum(1 for _ in _containers.leaves(new))
        return same_size and all(a is b or (type(a) in PLAIN_TYPES and _equal_plain(a, b)) for (_, a), (_, b) in pairs)
    return False
