"""Former values: what the body finds in a place in which it leaves another object, such as a state of several numbers.

A replay leaves an object there, too, so no identity can be compared. What code can have read of the former one is
compared part by part instead: classes, numbers, texts, the order of members, and what tensors tell of themselves. The
values of tensors are read by the replay.

What the key opens in the arguments is compared by the key, in the objects of the call at hand: a guard would look into
those of the recorded call.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import field

from capture.core.data import frozen
from capture.guards.guard import Guard
from capture.key import objects
from capture.key.code_names import MISSING, same_value
from capture.key.pytree import PLAIN_TYPES, children, is_container, is_registered
from capture.key.tensor_kind import attributes_of
from capture.state.call import Call
from capture.state.diff import content_before
from capture.state.snapshot import Change, Snapshot
from capture.state.source import Found, Source

_NAMED = ("attribute", "global", "slot")
_DEEPEST = 32
_PLAIN = frozenset({tuple, list, dict})
_NUMBERED, _KEYED = (tuple, list), (dict, OrderedDict, defaultdict)


def former_values(changes: Iterable[Change], rebuilt: Iterable[Found], set_only: Collection[str]) -> Iterator[Found]:
    """Places whose former values the body can have looked into, with these values. ``rebuilt``: those in which it put
    an equal one. ``set_only``: names that no code looks up. Numbers and the like have guards by themselves."""
    there = [(one.source, one.before) for one in changes if not (one.container or one.is_read_anew)]
    for source, value in (*there, *rebuilt):
        is_named = source.kind in _NAMED and source.name in set_only
        is_gradient = source.name == "grad" and issubclass(type(source.holder), torch.Tensor)
        if not (is_named or is_gradient or value is MISSING or type(value) in PLAIN_TYPES):
            yield source, value


def reached_by(
    changes: Iterable[Change], rebuilt: Iterable[Found], set_only: Collection[str], before: Snapshot
) -> Iterator[tuple[Any, str]]:
    """What code can have come to by these former values: the classes of objects, and what is compared as itself, with
    their paths."""
    for source, value in former_values(changes, rebuilt, set_only):
        todo = [_Likeness(before, {}).of(value)]
        for like in todo:  # which grows
            if type(like) is _Parts:
                todo += like.members
                if like.kind not in _PLAIN:
                    yield like.kind, like.kind.__qualname__
            elif type(like) is _Whole and type(like.value) not in PLAIN_TYPES:
                yield like.value, source.path


def is_in_key(place: Source, before: Snapshot, call: Call) -> bool:
    """Whether the key of a call has what a place holds: it is an argument, or a member of containers and objects that
    are opened on the way from one."""
    chain = list(place.chain())
    top = chain[-1]
    if not is_below_argument(place) or call.is_whole(top.path, top.holder):
        return False
    return all(_is_member(step, above, before) for step, above in itertools.pairwise(chain))


def is_below_argument(place: Source) -> bool:
    """Whether the way to a place begins at an argument, which is another object in every call."""
    while place.parent is not None:
        place = place.parent
    return place.kind == "root" and place.path not in ("self", "function")


def _is_member(place: Source, above: Source, before: Snapshot) -> bool:
    """Whether a place is a member of what was above it. Members of some classes have other names in the key."""
    known, container = before.sources.get(above.path, (None, None))
    if place.kind == "root" or known is not above or not is_container(container):
        return False
    now, suffix = place.get(), place.path.removeprefix(above.path)
    return any(
        name == suffix or (member is now and type(now) not in PLAIN_TYPES) for name, member in children(container)
    )


def guard_on(place: Source, value: Any, before: Snapshot) -> Guard:
    """A guard that a place holds what is like this value. ``before``: the state before the run, in which the body may
    have changed the value before it put another one there."""
    like = _Likeness(before, {id(tensor): required for _, tensor, required in before.flags}).of(value)
    return Guard("value", Source("call", _Alike(place, like), None, place.path), True)


@frozen
class _Whole:
    """A value that is not looked into: it has to be this one."""

    value: Any


@frozen
class _Parts:
    kind: type
    """Of a container or object: its class."""
    names: tuple[Any, ...] | None
    """Keys of a dict, names of attributes; None where members have numbers alone."""
    members: tuple[Any, ...]


@frozen
class _OfTensor:
    told: tuple[Any, ...]
    attributes: Any


@frozen(eq=False)
class _Likeness:
    """Makes the description of one value."""

    before: Snapshot
    required: Mapping[int, bool]
    """By ``id`` of a tensor, whether it required gradients before the run."""
    _above: list[int] = field(factory=list)

    def of(self, value: Any) -> Any:
        if issubclass(type(value), torch.Tensor):
            required = self.required.get(id(value), value.requires_grad)
            attributes = attributes_of(value)
            return _OfTensor(_told(value, required=required), self.of(attributes) if attributes else None)
        if not is_container(value) or id(value) in self._above or len(self._above) > _DEEPEST:
            return _Whole(value)
        self._above.append(id(value))
        kind = type(value)
        content = content_before(self.before, value) if kind in (list, dict) else None
        if content is not None:
            names, members = content
        elif kind in _KEYED:
            names, members = tuple(value), list(value.values())
        else:
            pairs = _held(value)
            names, members = tuple(name for name, _ in pairs), [member for _, member in pairs]
        made = _Parts(kind, None if kind in _NUMBERED else names, tuple(map(self.of, members)))
        self._above.pop()
        return made


def _held(value: Any) -> list[tuple[str, Any]]:
    """What it holds, also where somebody registered a way to open it that leaves some of that out."""
    kind = type(value)
    if is_registered(kind) and objects.is_plain(kind):
        return [(objects.suffix_of(name), member) for name, member in objects.members(value)]
    return children(value)


@frozen(eq=False)
class _Alike:
    """The guard's function."""

    place: Source
    like: Any

    def __call__(self) -> bool:
        return _is_alike(self.place.get(), self.like)


def _is_alike(value: Any, like: Any) -> bool:
    kind = type(like)
    if kind is _Whole:
        return same_value(value, like.value)
    if kind is _OfTensor:
        if not issubclass(type(value), torch.Tensor) or _told(value, required=value.requires_grad) != like.told:
            return False
        attributes = attributes_of(value) if value.__dict__ else None
        return not attributes if like.attributes is None else _is_alike(attributes or {}, like.attributes)
    if type(value) is not like.kind:
        return False
    members = value
    if like.kind in _KEYED:
        members = value.values()
        if len(value) != len(like.names) or not all(map(same_value, value, like.names)):
            return False
    elif like.names is not None:
        pairs = _held(value) if is_container(value) else []
        if [name for name, _ in pairs] != list(like.names):
            return False
        members = [member for _, member in pairs]
    return len(members) == len(like.members) and all(map(_is_alike, members, like.members))


def _told(tensor: torch.Tensor, *, required: bool) -> tuple[Any, ...]:
    """What a tensor tells of itself without its values."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return type(tensor), tensor.layout, tensor.dtype, required
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, required
