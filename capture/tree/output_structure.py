"""A structure without its leaves, and the places of effects, to be filled again after every replay."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import frozen

from capture.key import pytree
from capture.state.source import Source


class Slot:
    """Stands for a leaf in a structure without leaves. No attrs class, since those are containers to be opened."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@frozen(eq=False)
class EffectSlot:
    """Where an effect's value goes: ``steps`` below the object ``root`` of each call, or a fixed place."""

    skeleton: Any
    root: str | None
    steps: tuple[Source, ...]

    @property
    def path(self) -> str:
        """``self.last`` and the like."""
        return self.steps[-1].path

    def at(self, named_values: Callable[[], dict[str, Any]]) -> Source:
        """The place in this call's objects."""
        *above, last = self.steps
        if self.root is None:
            return last
        holder = named_values()[self.root]
        for source in above:
            holder = source.among(holder).get()
        return last.among(holder)


class OwnContainer:
    """Stands for a container of the caller's that the body handed back. No attrs class, like ``Slot``."""

    __slots__ = ("_root", "_slot")

    def __init__(self, slot: EffectSlot | None, root: str | None) -> None:
        self._slot, self._root = slot, root

    def at(self, named_values: Callable[[], dict[str, Any]]) -> Any:
        """The container of this call."""
        if self._slot is None:
            assert self._root is not None
            return named_values()[self._root]
        return self._slot.at(named_values).get()


def effect_slot(source: Source, skeleton: Any) -> EffectSlot:
    """Places below the receiver and arguments hold no reference to them: those belong to the caller."""
    *steps, root = source.chain()
    if root.kind == "root" and steps and root.path != "function":
        return EffectSlot(skeleton, root.path, tuple(step.among(None) for step in reversed(steps)))
    return EffectSlot(skeleton, None, (source,))


def fill(skeleton: Any, values: Sequence[Any], named_values: Callable[[], dict[str, Any]]) -> Any:
    """The structure with its slots replaced, every container new but those that are the caller's own."""
    if isinstance(skeleton, Slot):
        return values[skeleton.index]

    def leaf(one: Any) -> Any:
        if isinstance(one, Slot):
            return values[one.index]
        return one.at(named_values) if isinstance(one, OwnContainer) else one

    return pytree.rebuild(skeleton, leaf)


Filler = Callable[[Sequence[Any]], Any]
_MOST_DEPTH = 30  # levels, each a call of Python's


def filler(skeleton: Any, depth: int = 0) -> Filler | None:
    """``fill`` put together once; None for what has other containers than tuples and lists, or is nested deeply.

    Most results are one tensor or a flat tuple, which the standard library takes out of the values in C.
    """
    if isinstance(skeleton, Slot):
        return operator.itemgetter(skeleton.index)
    kind = type(skeleton)
    if depth > _MOST_DEPTH or (kind not in (tuple, list) and not pytree.is_namedtuple(kind)):
        return None
    if kind is tuple and len(skeleton) > 1 and all(isinstance(member, Slot) for member in skeleton):
        return operator.itemgetter(*[member.index for member in skeleton])
    members = [filler(member, depth + 1) for member in skeleton]
    known = [member for member in members if member is not None]
    if len(known) < len(members):
        return None
    if kind in (tuple, list):
        return lambda values: kind([member(values) for member in known])
    return lambda values: kind(*[member(values) for member in known])


def skeleton_of(value: Any, numbers: Iterator[int], own: dict[int, Source]) -> Any:
    """The structure without its leaves. ``own``: objects that existed before the run and are handed back, by ``id``."""
    source = own.get(id(value))
    if not pytree.is_container(value):
        number = next(numbers)
        return Slot(number) if source is None else _own(source)
    if source is None:
        return pytree.close(value, [skeleton_of(member, numbers, own) for _, member in pytree.children(value)])
    for _ in pytree.leaves(value):
        next(numbers)
    return _own(source)


def _own(source: Source) -> OwnContainer:
    if source.kind == "root":  # found by its name in every call, and not kept alive
        return OwnContainer(None, source.path)
    return OwnContainer(effect_slot(source, None), None)
