"""Objects that stand for the caller's in a run, as they hold other tensors than those: what the run did to them is done
to the caller's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from capture.key import pytree
from capture.key.code_names import MISSING
from capture.key.pytree import TENSOR_TYPES
from capture.state import diff, effects
from capture.state.snapshot import Change, snapshot
from capture.state.source import Source


def with_callers(theirs: Mapping[int, Any], value: Any) -> Any:
    """The value with the caller's leaves in place of those that stand for them. ``theirs``: those, by ``id`` of what
    stands for them."""
    return pytree.replace_leaves(value, lambda leaf: theirs.get(id(leaf), leaf))


def settle(changes: Sequence[Change], roots: dict[str, Any], theirs: Mapping[int, Any]) -> None:
    """Make these changes to the caller's objects. ``roots``: the caller's own, by name."""
    for change in changes:
        place = _of_caller(change.source, roots)
        if change.container:
            if place is not change.source:
                _put_members(place.get(), change.source.get(), theirs)
            elif change.members is not None and any(id(member) in theirs for member in change.after):
                keys, values = effects.members_of(change.members.container)
                effects.put_members(change.members.container, [theirs.get(id(value), value) for value in values], keys)
        elif place is not change.source or id(change.after) in theirs:
            place.remove() if change.after is MISSING else place.set(with_callers(theirs, change.after))


def _of_caller(source: Source, roots: dict[str, Any]) -> Source:
    """The place that corresponds to this one below the caller's own arguments."""
    *below, root = source.chain()
    if root.kind != "root" or not below or root.path not in roots or roots[root.path] is root.holder:
        return source
    value = roots[root.path]
    for step in below[:0:-1]:
        value = step.among(value).get()
    return below[0].among(value)


def _put_members(container: Any, like: Any, theirs: Mapping[int, Any]) -> None:
    if container is not like and type(container) is type(like) and issubclass(type(like), (list, dict, set, deque)):
        keys, values = effects.members_of(like)
        effects.put_members(container, [with_callers(theirs, value) for value in values], keys)


class StandIns:
    """Arguments of one run of which some stand for the caller's."""

    def __init__(self, given: dict[str, Any], own: dict[str, Any], theirs: Mapping[int, Any]) -> None:
        """``given`` and ``own``: the arguments of the run and of the caller, by name."""
        pairs = [(name, given[name]) for name, value in own.items() if given[name] is not value]
        made = [(name, value) for name, value in pairs if type(value) not in TENSOR_TYPES]
        self._own, self._theirs, self._made = own, theirs, {id(value): own[name] for name, value in made}
        self._before = snapshot([Source("root", value, None, name) for name, value in made]) if made else None

    def settle(self) -> None:
        """What the run did to the arguments so far is done to the caller's own."""
        if self._before is not None:
            settle(diff.changes(self._before), self._own, self._theirs)

    def without(self, result: Any) -> Any:
        """The result of the run with the caller's arguments in place of those that stand for them."""
        if type(result) is tuple and self._made:
            return tuple([self._made.get(id(member), member) for member in result])
        return self._made.get(id(result), result)
