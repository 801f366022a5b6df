"""Numbers in containers among the arguments, as in ``batch["step"]`` and ``state.position``, as inputs of their own.

A container is opened, so each number in it is a part of the key. One that is another number in other calls is an input
of its own from then on, as a number is that is an argument itself: the container's part of the key leaves it out, and
whatever is known of numbers among the arguments holds for it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from capture.core.data import frozen
from capture.key import objects, pytree
from capture.key.attributes import MISSING
from capture.key.input_places import InputPlace, PlaceInArgument
from capture.key.objects import Name, Visit
from capture.key.signature import Binder, LeftOut

_DICTS = (dict, OrderedDict, defaultdict)
_MOST_CANDIDATES = 64
"""Numbers in one call's arguments that are looked at. For each of them the key is made once."""


@frozen(eq=False)
class ArgumentNumber(PlaceInArgument):
    """A number in an argument. ``steps``: the names on the way to it, as members have them."""

    steps: tuple[Name, ...] = ()

    @override
    def key(self) -> tuple[Any, Any]:
        return self.at, self.steps

    @override
    def leads_to(self, path: str, *, is_in_argument: bool) -> bool:
        return is_in_argument and path == self.path

    @override
    def is_at(self, holder: Any) -> bool:
        """Always: the way to both is the same, and begins at an argument."""
        return True

    @override
    def read_in(self, values: Sequence[Any]) -> Any:
        there = self._there(values)
        return MISSING if there is None else there.read()

    @override
    def write_in(self, values: Sequence[Any], value: Any) -> None:
        there = self._there(values)
        if there is not None and there.read() is not value:
            there.write(value)

    def left_out(self, values: Sequence[Any]) -> LeftOut | None:
        """What the container's part of the key has nothing of; None where no number is there."""
        there = self._there(values)
        if there is None or type(there.read()) not in (int, float):
            return None
        return id(there.keeper()), self.steps[-1]

    def _there(self, values: Sequence[Any]) -> InputPlace | None:
        """The place in a call with these arguments; None where the way to it is another one."""
        holder = values[self.at]
        for step in self.steps[:-1]:
            holder = _member(holder, step).read()
        return None if holder is MISSING else _member(holder, self.steps[-1])


def _member(holder: Any, name: Name) -> InputPlace:
    kind, at = name
    return InputPlace("", lambda: holder, at.__name__ if kind == "slot" else at, is_attribute=kind != "item")


def left_out(places: Sequence[InputPlace], values: Sequence[Any]) -> frozenset[LeftOut]:
    """All that parts of the key have nothing of, as it is an input of its own."""
    numbers = [place.left_out(values) for place in places if isinstance(place, ArgumentNumber)]
    return frozenset(one for one in numbers if one is not None)


def differing(
    binder: Binder, values: Sequence[Any], parts: Sequence[Any], others: Sequence[Any],
    parts_without: Callable[[LeftOut], Sequence[Any]],
) -> list[ArgumentNumber]:  # fmt: skip
    """Numbers in containers among the arguments, where the parts of two keys differ in nothing but numbers. ``values``:
    those of the call whose key has ``parts``; ``parts_without``: the same parts, but for one number."""
    wanted = {index for index in _numbers_apart(parts, others) if len(index) > 1}
    if not wanted:
        return []
    found = []
    for place in itertools.islice(_candidates(binder, values), _MOST_CANDIDATES):
        without = place.left_out(values)
        indices = wanted.intersection(_apart(parts, parts_without(without))) if without is not None else None
        if indices:  # several where one container is in several places
            wanted -= indices
            found.append(place)
    return [] if wanted else found


def _candidates(binder: Binder, values: Sequence[Any]) -> Iterator[ArgumentNumber]:
    count, visit = len(binder.names) - len(binder.places), Visit()
    for at, (name, value) in enumerate(zip(binder.names[:count], values, strict=False)):
        path = "" if name == binder.keywords else name
        for steps, suffix in _numbers_in(value, visit):
            yield ArgumentNumber(f"{path}{suffix}".removeprefix("."), lambda: None, steps[-1][1], at=at, steps=steps)


def _numbers_in(value: Any, visit: Visit) -> Iterator[tuple[tuple[Name, ...], str]]:
    """The way to each number in a container that can be given another one there."""
    if not pytree.is_container(value) or not visit.is_new(value):
        return
    is_changeable = type(value) in (*_DICTS, list) or pytree.is_object(type(value))
    for name, suffix, member in _members(value):
        if type(member) in (int, float) and is_changeable:
            yield (name,), suffix
        else:
            for steps, below in _numbers_in(member, visit):
                yield (name, *steps), suffix + below


def _members(value: Any) -> list[tuple[Name, str, Any]]:
    """The members of a container, by the names that its part of the key has for them, with what they add to a path."""
    kind = type(value)
    names: Iterable[Name]
    if kind in _DICTS:
        names = [("item", key) for key in value]
    elif kind in (tuple, list) or pytree.is_namedtuple(kind):
        names = [("item", at) for at in range(len(value))]
    elif pytree.is_object(kind) and objects.is_plain(kind):
        names = [name for name, _ in objects.members(value)]
    else:
        return []
    return [(name, *child) for name, child in zip(names, pytree.children(value), strict=True)]


Index = tuple[int, ...]


def _numbers_apart(parts: Any, others: Any) -> frozenset[Index]:
    """Where in the parts of two keys numbers differ; empty where anything else does."""
    places = _apart(parts, others)
    return frozenset(places) if all(are_numbers(_at(parts, one), _at(others, one)) for one in places) else frozenset()


def are_numbers(one: Any, other: Any) -> bool:
    """Whether these parts of two keys are those of plain numbers of one type."""
    parts = all(type(part) is tuple and len(part) == 2 and part[0] in (int, float) for part in (one, other))
    return parts and one[0] is other[0]


def _at(part: Any, index: Index) -> Any:
    for at in index:
        part = part[at]
    return part


def _apart(part: Any, other: Any, index: Index = ()) -> list[Index]:
    """Where two parts differ, as deep as they are tuples of one length. A number's own part is one thing."""
    if part == other:
        return []
    are_tuples = type(part) is tuple and type(other) is tuple and len(part) == len(other)
    if not are_tuples or part[:1] != other[:1] or are_numbers(part, other):
        return [index]
    return [one for at, (a, b) in enumerate(zip(part, other, strict=True)) for one in _apart(a, b, (*index, at))]
