"""Skeleton: a structure without its leaves, and the places of effects, to be filled again after every replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import frozen

from capture import _containers
from capture._places import Place


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
    steps: tuple[Place, ...]

    @property
    def path(self) -> str:
        """``self.last`` and the like."""
        return self.steps[-1].path

    def at(self, named_values: Callable[[], dict[str, Any]]) -> Place:
        """The place in this call's objects."""
        *above, last = self.steps
        if self.root is None:
            return last
        holder = named_values()[self.root]
        for place in above:
            holder = place.among(holder).get()
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


def effect_slot(place: Place, skeleton: Any) -> EffectSlot:
    """Places below the receiver and arguments hold no reference to them: those belong to the caller."""
    *steps, root = place.chain()
    if root.kind == "root" and steps and root.path != "function":
        return EffectSlot(skeleton, root.path, tuple(step.among(None) for step in reversed(steps)))
    return EffectSlot(skeleton, None, (place,))


def fill(skeleton: Any, values: Sequence[Any], named_values: Callable[[], dict[str, Any]]) -> Any:
    """The structure with its slots replaced, every container new but those that are the caller's own."""
    if isinstance(skeleton, Slot):
        return values[skeleton.index]

    def leaf(one: Any) -> Any:
        if isinstance(one, Slot):
            return values[one.index]
        return one.at(named_values) if isinstance(one, OwnContainer) else one

    return _containers.rebuild(skeleton, leaf)


def filler(skeleton: Any) -> Callable[[Sequence[Any]], Any] | None:
    """``fill`` as one expression; None for what has other containers than tuples and lists."""
    kinds: list[type] = []
    text = _expression(skeleton, kinds)
    if text is None:
        return None
    scope = {f"K{number}": kind for number, kind in enumerate(kinds)}
    try:
        fills: Callable[[Sequence[Any]], Any] = eval(f"lambda values: {text}", scope)  # noqa: S307 - made below
    except (SyntaxError, RecursionError, MemoryError):  # nested too deeply for Python
        return None
    return fills


def _expression(skeleton: Any, kinds: list[type]) -> str | None:
    """The structure in Python. ``kinds``: classes that it names, by number."""
    if isinstance(skeleton, Slot):
        return f"values[{skeleton.index}]"
    kind = type(skeleton)
    if kind not in (tuple, list) and not _containers.is_namedtuple(kind):
        return None
    members = [_expression(member, kinds) for member in skeleton]
    known = [one for one in members if one is not None]
    if len(known) < len(members):
        return None
    if kind in (tuple, list):
        begin, end = "()" if kind is tuple else "[]"
        return f"{begin}{', '.join(known)}{',' if len(known) == 1 else ''}{end}"
    kinds.append(kind)
    return f"K{len(kinds) - 1}({', '.join(known)})"


def skeleton_of(value: Any, numbers: Iterator[int], own: dict[int, Place]) -> Any:
    """The structure without its leaves. ``own``: objects that existed before the run and are handed back, by ``id``."""
    place = own.get(id(value))
    if not _containers.is_container(value):
        number = next(numbers)
        return Slot(number) if place is None else _own(place)
    if place is None:
        return _containers.close(
            value, [skeleton_of(member, numbers, own) for _, member in _containers.children(value)]
        )
    for _ in _containers.leaves(value):
        next(numbers)
    return _own(place)


def _own(place: Place) -> OwnContainer:
    if place.kind == "root":  # found by its name in every call, and not kept alive
        return OwnContainer(None, place.path)
    return OwnContainer(effect_slot(place, None), None)
