"""What a body changed in the Python objects that it can reach, and how these are put back."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from capture.key import pytree
from capture.key.attributes import MISSING, keys_of, names_of, plain_class
from capture.key.code_names import same_value
from capture.key.objects import closed_package
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_kind import is_leaf
from capture.state.namespaces import counts
from capture.state.snapshot import (
    CLOSED,
    Change,
    Snapshot,
    content_of,
    function_sources,
    is_whole_module,
    keys_of_hooks,
    module_sources,
    place_key,
)
from capture.state.source import Source, are_as_they_were


def changes(before: Snapshot) -> list[Change]:
    """Differences from ``before``: sources with other values, and members and attributes that were added or removed."""
    differences = []
    same = _unchanged_modules(before)
    filled = _filled(before)
    for source, old in before.sources.values():
        if id(source.parent) in same:
            continue
        new = source.get()
        if new is not old and not _equal_plain(filled.get(id(old), old), new):
            differences.append(Change(source, old, new))
        elif new is not old:
            before.rebuilt.add(source.path)
    for source, holder in before.entered:
        if id(source) not in same:
            differences.extend(_new_attributes(before, source, holder))
    replaced = {id(change.source) for change in differences}
    for source, container, members in before.members:
        now = _keys_now(before, source, container, members)
        if id(source) in replaced or (id(container) in filled and source.path in before.rebuilt):
            if id(container) in filled or (
                _had_no_places(before, source, container, members) and not _same_members(now, members)
            ):
                before.dropped.add(source.path)
            continue  # if it has other members, another container is in its place
        if not _same_members(now, members) or _has_moved(before, source, container, members):
            differences.extend(_new_members(source, container, members, now))
    return differences + _by_name(before) + _of_tensors(before) + _contents(before)


def _by_name(before: Snapshot) -> list[Change]:
    """Names in classes, scopes and the like that were added, removed or changed, and have no sources."""
    places = [(one, *rest) for space in before.namespaces.values() for one, *rest in space.changes()]
    known = {place_key(one) for one, _ in before.sources.values()} if places else set()
    return [Change(one, old, new) for one, old, new in places if place_key(one) not in known]


def _of_tensors(before: Snapshot) -> list[Change]:
    """Tensors of which ``requires_grad`` changed, or on which an attribute was put for the first time."""
    differences = []
    for source, tensor, required in before.flags:
        if tensor.requires_grad != required:
            place = Source("attribute", tensor, "requires_grad", f"{source.path}.requires_grad", source)
            differences.append(Change(place, required, tensor.requires_grad))
            differences.extend(_first_gradient(before, source, tensor))
        if id(tensor) not in before.namespaces:
            for name, value in filter(lambda item: counts(item[0]), tensor.__dict__.items()):
                place = Source("attribute", tensor, name, f"{source.path}.{name}", source)
                differences.append(Change(place, MISSING, value))
    return differences


def _first_gradient(before: Snapshot, source: Source, tensor: torch.Tensor) -> list[Change]:
    """The gradient that a tensor got which required none before, and had none: such a place is not walked."""
    path = f"{source.path}.grad"
    if path in before.sources or not is_leaf(tensor) or tensor.grad is None:
        return []
    return [Change(Source("attribute", tensor, "grad", path, source), None, tensor.grad)]


def _contents(before: Snapshot) -> list[Change]:
    """Arrays and the like that were written in place, and modules whose hooks changed."""
    return [
        Change(source, "its content", "another content", container=True)
        for source, value, content in before.states
        if content_of(value) != content
    ] + [
        Change(Source("attribute", module, "hooks", f"{source.path}.(hooks)", source), "some", "others", container=True)
        for source, module, keys in before.hooks
        if keys_of_hooks(module) != keys
    ]


def _filled(before: Snapshot) -> dict[int, Any]:
    """By ``id`` of a list or dict whose members changed: a copy with the former members."""
    former: dict[int, Any] = {}
    for source, container, members in before.members:
        if not issubclass(type(container), (list, dict, deque)):
            continue
        if not _same_members(_keys_now(before, source, container, members), members):
            paths = member_paths(source, container, members)
            if all(path in before.sources for path in paths):  # else it has members that the walk did not look at
                values: Any = [before.sources[path][1] for path in paths]
                if issubclass(type(container), dict):
                    values = dict(zip(members, values, strict=True))
                elif issubclass(type(container), deque):
                    values = deque(values)
                former[id(container)] = values
    return former


def content_before(before: Snapshot, container: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Keys or positions, and members, of a container of the snapshot. None if the walk did not look at all of them."""
    for source, held, members in before.members:
        if held is container:
            if _had_no_places(before, source, container, members):
                return members, list(members)
            paths = member_paths(source, container, members)
            all_known = all(path in before.sources for path in paths)
            return (members, [before.sources[path][1] for path in paths]) if all_known else None
    return None


def member_paths(source: Source, container: Any, members: tuple[Any, ...]) -> list[str]:
    """Paths of a container's members, by their keys."""
    if issubclass(type(container), dict):
        return [f"{source.path}.{key if isinstance(key, str) else index}" for index, key in enumerate(members)]
    return [f"{source.path}.{index}" for index in range(len(members))]


def _new_members(source: Source, container: Any, before: tuple[Any, ...], now: tuple[Any, ...]) -> list[Change]:
    """Changes of a dict with names as keys that only got more members: one for each new member. Any other container is
    one change as a whole."""
    count, more = len(before), now[len(before) :]
    if (
        issubclass(type(container), dict)
        and _same_members(now[:count], before)
        and all(type(key) is str for key in more)
    ):
        sources = [Source("item", container, key, f"{source.path}.{key}", source) for key in more]
        return [Change(one, MISSING, one.get()) for one in sources]
    return [Change(source, f"{count} members", f"{len(now)} members", container=True)]


def _unchanged_modules(before: Snapshot) -> set[int]:
    """``id`` of the sources of modules of which nothing changed, so that their members need not be compared one by
    one."""
    if any(len(function_sources(f, None)) != number for f, number in before.forwards.items()):
        return set()
    return {id(source) for source, tables in before.tables if are_as_they_were(tables)}


def _same_members(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a is b or (type(a) in (int, str) and a == b) for a, b in pairs)


def _new_attributes(before: Snapshot, source: Source, holder: Any) -> list[Change]:
    if issubclass(type(holder), (types.FunctionType, torch.Tensor, *CLOSED)) or source.get() is not holder:
        return []
    path = source.path
    if is_whole_module(holder):
        now = module_sources(holder, source)
    elif closed_package(type(holder).__module__):
        return []
    else:
        now = [(place, place.get()) for place in (Source("attribute", holder, name, f"{path}.{name}", source)
               for name in names_of(holder) or () if not name.startswith("__"))]  # fmt: skip
    return [Change(new, MISSING, value) for new, value in now if new.path not in before.sources]


def _equal_plain(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if type(old) in (float, complex):
        return same_value(old, new)  # 0.0 and -0.0 are other values
    if type(old) in PLAIN_TYPES or issubclass(type(old), types.MethodType):
        return bool(old == new)
    if issubclass(type(old), tuple) or type(old) in (list, dict, OrderedDict, defaultdict):
        pairs = list(zip(pytree.leaves(old), pytree.leaves(new), strict=False))
        same_size = sum(1 for _ in pytree.leaves(old)) == sum(1 for _ in pytree.leaves(new))
        return same_size and all(a is b or (type(a) in PLAIN_TYPES and _equal_plain(a, b)) for (_, a), (_, b) in pairs)
    return False


def restore(before: Snapshot, changed: list[Change]) -> None:
    """Put every changed source and every container's members back as the snapshot saw them."""
    for source, container, members in before.members:
        if source.path in before.dropped:
            _put_members(before, source, container, members)
            source.set(container)
    for change in sorted(
        changed, key=lambda each: not each.container
    ):  # containers first, so that members exist when they are set
        if change.container:
            _restore_members(before, change)
        elif change.before is MISSING:
            change.source.remove()
        else:
            change.source.set(change.before)


def _keys_now(before: Snapshot, source: Source, container: Any, members: tuple[Any, ...]) -> tuple[Any, ...]:
    """Its keys, as the snapshot has those of before. What a deque holds now may have places where that had none."""
    if not issubclass(type(container), deque):
        return keys_of(container)
    if _had_no_places(before, source, container, members):
        return tuple(deque.__iter__(container))
    return tuple(range(deque.__len__(container)))


def _had_no_places(before: Snapshot, source: Source, container: Any, members: tuple[Any, ...]) -> bool:
    """Whether it is a set, or a deque whose members the snapshot has as a whole."""
    if issubclass(type(container), deque):
        return any(path not in before.sources for path in member_paths(source, container, members))
    return issubclass(type(container), (set, frozenset))


def _restore_members(before: Snapshot, change: Change) -> None:
    for source, container, members in before.members:
        if source is change.source:
            _put_members(before, source, container, members)


def _has_moved(before: Snapshot, source: Source, container: Any, members: tuple[Any, ...]) -> bool:
    """Whether a deque has as many members as before, and others: an append to a full one changes all its places, but
    is one change."""
    if not issubclass(type(container), deque) or _had_no_places(before, source, container, members):
        return False
    held = [before.sources[path][1] for path in member_paths(source, container, members)]
    pairs = zip(held, deque.__iter__(container), strict=True)
    return not all(one is was or _equal_plain(was, one) for was, one in pairs)


def _put_members(before: Snapshot, source: Source, container: Any, members: tuple[Any, ...]) -> None:
    if _had_no_places(before, source, container, members):
        put_members(container, members)
        return
    values = [before.sources[path][1] for path in member_paths(source, container, members)]
    put_members(container, values, members)


def put_members(container: Any, values: Sequence[Any], keys: Sequence[Any] | None = None) -> None:
    """Give a container these members, by the methods of its built-in class: a user's class may do more in its own."""
    if issubclass(type(container), dict):
        assert keys is not None
        items = list(zip(keys, values, strict=True))
        base = plain_class(container)
        if list(dict.keys(container)) != list(keys)[: len(container)]:
            base.clear(container)
        for key, value in items:
            base.__setitem__(container, key, value)
    elif issubclass(type(container), list):
        list.__setitem__(container, slice(None), values)
    elif issubclass(type(container), deque):
        deque.clear(container)
        deque.extend(container, values)
    elif issubclass(type(container), set):
        set.clear(container)
        set.update(container, values)
