"""The structure of a result without its leaves, and the places of effects, to be filled again after every replay."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.key import objects, pytree
from capture.key.code_names import MISSING
from capture.key.objects import Visit
from capture.native import native
from capture.observe.result_objects import is_copied
from capture.state import effects
from capture.state.snapshot import Change
from capture.state.source import Source


class Slot:
    """The place of a leaf in a structure without leaves. No attrs class, since those are opened as containers."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Copied:
    """Stands for what can be changed and is not opened, such as a set or an array: each call has one of its own. No
    attrs class, like ``Slot``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Shape:
    """Stands for an object that is opened, and is made anew. ``number``: of the object among all of the plan's. No
    attrs class, like ``Slot``; and no object of the user's class, which would be one more that its code gets to see."""

    __slots__ = ("is_own_dict", "is_shared", "kind", "members", "number")

    def __init__(self, number: int, like: Any, *, is_shared: bool) -> None:
        self.number, self.kind, self.is_own_dict = number, type(like), objects.is_own_dict(like)
        self.is_shared = is_shared
        self.members: list[tuple[objects.Name, Any]] = []


class Shared:
    """Stands for a list, dict or tuple that is in several places, as where the body keeps the very list that it
    returns. No attrs class, like ``Slot``."""

    __slots__ = ("number", "skeleton")

    def __init__(self, number: int, skeleton: Any) -> None:
        self.number, self.skeleton = number, skeleton


class Again:
    """The place of an object or container that was made before, or of a weak reference to it."""

    __slots__ = ("is_weak", "number")

    def __init__(self, number: int, *, is_weak: bool) -> None:
        self.number, self.is_weak = number, is_weak


DONE = object()
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
Begun = list[tuple["EffectSlot", Any]]


@frozen(eq=False)
class EffectSlot:
    """Where an effect goes: ``steps`` below the object ``root`` of each call, or below what ``anchor`` gives. The value
    there is replaced, unless an ``amount`` is added to it, or members of a container are put there by a ``recipe``."""

    skeleton: Any
    root: str | None
    steps: tuple[Source, ...]
    anchor: Callable[[], Any] | None = None
    amount: int | None = None
    members: MembersMade | None = None
    adds: bool = False
    """The value is added to the number that is there."""

    @property
    def path(self) -> str:
        """``self.last`` and the like."""
        return self.steps[-1].path

    is_gradient: bool = field(init=False)
    """It puts the gradient of a tensor, which is on the way to no other place."""

    def __attrs_post_init__(self) -> None:
        last = self.steps[-1]
        object.__setattr__(self, "is_gradient", last.kind == "attribute" and last.name == "grad")

    def at(self, named_values: Callable[[], dict[str, Any]], holders: dict[int, Any] | None = None) -> Source:
        """The place among this call's objects. ``holders``: objects on the way to places, by ``id`` of their source;
        those that are met here are added."""
        return self.steps[-1].among(self._holder(named_values, holders))

    def _holder(self, named_values: Callable[[], dict[str, Any]], holders: dict[int, Any] | None) -> Any:
        above = self.steps[:-1]
        begin = len(above) if holders else 0
        while begin and holders is not None and id(above[begin - 1]) not in holders:
            begin -= 1
        if begin and holders is not None:
            holder = holders[id(above[begin - 1])]
        else:
            holder = named_values()[self.root] if self.root is not None else self.anchor() if self.anchor else None
        for source in above[begin:]:
            holder = source.below(holder)
            if holders is not None:
                holders[id(source)] = holder
        return holder

    def saved(self, named_values: Callable[[], dict[str, Any]]) -> Any:
        """The present value, for ``put_back``."""
        value = self.at(named_values).get()
        return value if self.members is None else effects.members_of(value)

    def put_back(
        self, named_values: Callable[[], dict[str, Any]], saved: Any, holders: dict[int, Any] | None = None
    ) -> None:  # fmt: skip
        """Restore the value that ``saved`` gave. ``holders``: see ``at``."""
        holder = self._holder(named_values, holders)
        if self.is_gradient and type(holder) in _PLAIN_TENSORS and saved is not MISSING:
            holder.grad = saved  # without a source of its own: of many effects of a training step most are gradients
            return
        place = self.steps[-1].among(holder)
        if self.members is not None:
            keys, values = saved
            effects.put_members(place.get(), values, keys)
        elif saved is MISSING:
            place.remove()
        else:
            place.set(saved)

    def apply(
        self, named_values: Callable[[], dict[str, Any]], value: Any, begun: Begun, holders: dict[int, Any]
    ) -> None:  # fmt: skip
        """Make the change again. ``begun``: former values of the effects of this call that were begun, as it may be
        stopped in the middle; or ``DONE``, where the body itself made the changes, and only its tensors may be
        others."""
        begun_with = next((saved for slot, saved in begun if slot is self), None) if begun else None
        if self.amount is None and self.members is None and not self.adds:
            is_there = begun_with is DONE and isinstance(self.skeleton, OwnContainer) and not self.skeleton.is_argument
            if not is_there:  # otherwise it would be read where the body has put another one by now
                self.put_back(named_values, value, holders)
            return
        if begun_with is not DONE:
            self._go_on(named_values, value, begun_with, begun)
        elif self.members is not None:
            container = self.at(named_values).get()
            keys, values = effects.members_of(container)
            effects.put_members(container, self.members.finished(values, value), keys)

    def is_done(self, change: Change, named_values: Callable[[], dict[str, Any]]) -> bool:
        """Whether the body made this change to the caller's own objects, not to copies that were given in their
        place."""
        place = self.at(named_values)
        return place.get() is change.members.container if change.members else place.holder is change.source.holder

    def _go_on(self, named_values: Callable[[], dict[str, Any]], value: Any, begun_with: Any, begun: Begun) -> None:
        place = self.at(named_values)
        held = place.get()
        if self.members is None:
            if begun_with is None:
                begun_with = held
                begun.append((self, begun_with))
            place.set(begun_with + (value if self.amount is None else self.amount))
            return
        grows = self.members.is_free and getattr(held, "maxlen", None) is None
        if begun_with is None:
            begun_with = len(held) if grows else effects.members_of(held)
            begun.append((self, begun_with))
        if grows:  # the former members are not needed, so they are not walked
            effects.put_at_end(held, begun_with, value)
        else:
            effects.put_members(held, self.members.made(begun_with[1], value), self.members.keys)


@frozen(eq=False)
class MembersMade:
    """How the members of a container are made of its former members and new ones: see ``state.snapshot.Members``."""

    keys: tuple[Any, ...] | None
    recipe: tuple[int, ...]
    is_free: bool

    def made(self, before: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        """The members after the change."""
        if self.is_free:
            return [*before, *new]
        return [before[at] if at >= 0 else new[-1 - at] for at in self.recipe]

    def finished(self, now: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        """The members that the body left, with these in the places of the new ones."""
        if self.is_free:
            return [*now[: len(now) - len(new)], *new]
        return [one if at >= 0 else new[-1 - at] for one, at in zip(now, self.recipe, strict=True)]


class OwnContainer:
    """A container of the caller's that the body handed back. No attrs class, like ``Slot``."""

    __slots__ = ("_root", "_slot")

    def __init__(self, slot: EffectSlot | None, root: str | None) -> None:
        self._slot, self._root = slot, root

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument, of which the body may have got a copy."""
        return self._slot is None

    def at(self, named_values: Callable[[], dict[str, Any]]) -> Any:
        """The container of this call."""
        if self._slot is None:
            assert self._root is not None
            return named_values()[self._root]
        return self._slot.at(named_values).get()


def slot_of_change(
    change: Change, skeleton: Any, former: Mapping[int, Any], steps: dict[int, Source]
) -> EffectSlot:  # fmt: skip
    """The place of a change, and how it is made again. ``former``, ``steps``: see ``effect_slot``."""
    members = change.members
    made = None if members is None else MembersMade(members.keys_now, members.recipe, members.is_free)
    slot = effect_slot(change.source, skeleton, former, steps)
    return evolve(slot, amount=change.amount, members=made, adds=change.adds_read)


def effect_slot(
    source: Source, skeleton: Any, former: Mapping[int, Any], steps: dict[int, Source] | None = None
) -> EffectSlot:  # fmt: skip
    """The way to a place begins at the receiver or an argument, by name, as those belong to the caller. Where a step of
    it leads elsewhere than to the very object that was met there, as from a module to a hook, the way begins at that
    object. ``former``: what the body replaced, by ``id`` of the source. ``steps``: those made so far, by ``id`` of the
    source, for slots whose ways begin alike: what a replay meets on one it need not look up for the others."""
    steps = {} if steps is None else steps
    chain = list(source.chain())[::-1]
    begin = 0
    for number in range(1, len(chain)):
        if not _leads_on(chain[number - 1], chain[number], former):
            begin = number
    for one in chain[begin:]:
        if id(one) not in steps:
            steps[id(one)] = one.among(None)
    first, below = chain[begin], tuple([steps[id(step)] for step in chain[begin + 1 :]])
    if begin == 0 and first.kind == "root" and not below and first.path != "function":
        return EffectSlot(skeleton, first.path, (steps[id(first)],))
    if begin == 0 and first.kind == "root" and below and first.path != "function":
        return EffectSlot(skeleton, first.path, below)
    if first.kind == "root" and below:
        return EffectSlot(skeleton, None, below, _weakly(first.holder))
    return EffectSlot(skeleton, None, (steps[id(first)], *below), _weakly(first.holder))


def _leads_on(above: Source, below: Source, former: Mapping[int, Any]) -> bool:
    value = former[id(above)] if id(above) in former else above.get()
    return below.kind != "root" and below.among(value).holder is below.holder


def _weakly(holder: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def fill(skeleton: Any, values: Sequence[Any], named_values: Callable[[], dict[str, Any]], made: dict[Any, Any]) -> Any:
    """The structure with its slots replaced, every container new but those that are the caller's own. ``made``: objects
    by number, and copies, for structures that share some."""
    if isinstance(skeleton, Slot):
        return values[skeleton.index]

    def leaf(part: Any) -> Any:
        if isinstance(part, Slot):
            return values[part.index]
        if isinstance(part, Copied):
            kept = values[part.index]
            if (Copied, id(kept)) not in made:
                made[Copied, id(kept)] = copy.copy(kept)
            return made[Copied, id(kept)]
        if isinstance(part, Shared):
            made[part.number] = fill(part.skeleton, values, named_values, made)
            return made[part.number]
        if isinstance(part, Shape):
            new = made[part.number] = objects.blank(part.kind, is_own_dict=part.is_own_dict)
            for name, member in part.members:
                objects.put(new, name, fill(member, values, named_values, made))
            return new
        if isinstance(part, Again):
            return weakref.ref(made[part.number]) if part.is_weak else made[part.number]
        if isinstance(part, OwnContainer):
            return made[OwnContainer, id(part)] if (OwnContainer, id(part)) in made else part.at(named_values)
        return part

    return pytree.rebuild(skeleton, leaf)


Filler = Callable[[Sequence[Any]], Any]
_MOST_DEPTH = 30  # levels, each a call of a Python function


def filler(skeleton: Any, depth: int = 0) -> Filler | None:
    """``fill`` put together once; None for what has objects in two places or the caller's own, or is nested deeply.

    What is made of tuples and lists alone runs in C.
    """
    if isinstance(skeleton, Slot):
        return operator.itemgetter(skeleton.index)
    if depth > _MOST_DEPTH:
        return None
    if isinstance(skeleton, Shape):
        return None if skeleton.is_shared else _object_filler(skeleton, depth)
    if not pytree.is_container(skeleton):
        return None
    kind, close = type(skeleton), pytree.closer(skeleton)
    if close is None:
        return None
    children = [member for _, member in pytree.children(skeleton)]
    members = [member.index if isinstance(member, Slot) else filler(member, depth + 1) for member in children]
    if None in members:
        return None
    made: Filler = native.OutputFiller(tuple(members), None if kind is tuple else close)
    return made


def _object_filler(shape: Shape, depth: int) -> Filler | None:
    members = [(name, filler(member, depth + 1)) for name, member in shape.members]
    fillers = [(name, member) for name, member in members if member is not None]
    if len(fillers) < len(members):
        return None

    def make(values: Sequence[Any]) -> Any:
        new = objects.blank(shape.kind, is_own_dict=shape.is_own_dict)
        for name, member in fillers:
            objects.put(new, name, member(values))
        return new

    return make


@define(eq=False)
class Structures:
    """Makes the skeletons of all structures of one plan, in turn."""

    numbers: Iterator[int]
    """Numbers of the leaves to come."""
    sources: dict[int, Source]
    """Objects that existed before the run and are handed back, by ``id``."""
    arrays: frozenset[int] = frozenset()
    """Numbers of leaves that are arrays on the memory of a tensor."""
    former: Mapping[int, Any] = field(factory=dict)
    """See ``effect_slot``."""
    shared: frozenset[int] = frozenset()
    """``id`` of containers and objects that are in several places: see ``in_several_places``."""
    shapes: dict[int, Shape] = field(factory=dict)
    """The shapes of objects met so far, by ``id``."""
    own: dict[int, tuple[Any, str]] = field(factory=dict)
    """By ``id`` of an ``OwnContainer``, the container that this run handed back, and the name at which the way to it
    begins."""
    _containers: dict[int, tuple[Shared, Any]] = field(factory=dict)
    """Shared containers met so far, by ``id``, with the container, so that no other one gets its address."""

    def skeleton(self, value: Any, visit: Visit | None = None) -> Any:
        """The structure without its leaves. ``visit``: as in ``pytree.leaves``."""
        visit = Visit() if visit is None else visit
        source = self.sources.get(id(value))
        if not pytree.is_container(value):
            number, shape = next(self.numbers), self.shapes.get(id(objects.referent(value)))
            if source is not None:
                return self._own(value, source)
            if shape is not None:
                return Again(shape.number, is_weak=True)
            return Copied(number) if is_copied(value) and number not in self.arrays else Slot(number)
        if source is not None or id(value) in self.shapes:
            for _ in pytree.leaves(value, visit=visit):
                next(self.numbers)
            return Again(self.shapes[id(value)].number, is_weak=False) if source is None else self._own(value, source)
        if not pytree.is_new(value, visit) or not pytree.is_made_anew(type(value)):
            return self._container(value, visit)
        number = len(self.shapes) + len(self._containers)
        shape = self.shapes[id(value)] = Shape(number, value, is_shared=id(value) in self.shared)
        shape.members += [(name, self.skeleton(member, visit)) for name, member in objects.members(value)]
        return shape

    def _own(self, value: Any, source: Source) -> OwnContainer:
        own = _own(source, self.former)
        self.own[id(own)] = value, [*source.chain()][-1].path
        return own

    def _container(self, value: Any, visit: Visit) -> Any:
        if id(value) not in self.shared:
            return pytree.close(value, [self.skeleton(member, visit) for _, member in pytree.children(value)])
        if (met := self._containers.get(id(value))) is not None:
            for _ in pytree.leaves(value, visit=visit):
                next(self.numbers)
            return Again(met[0].number, is_weak=False)
        members = [self.skeleton(member, visit) for _, member in pytree.children(value)]
        made = Shared(len(self.shapes) + len(self._containers), pytree.close(value, members))
        self._containers[id(value)] = made, value
        return made


def in_several_places(values: Iterable[Any]) -> frozenset[int]:
    """``id`` of all containers and objects that are met more than once in these structures. Empty tuples are all one
    object."""
    todo, seen, several = list(values), dict[int, Any](), set[int]()
    while todo:
        value = todo.pop()
        if (
            issubclass(type(value), torch.Tensor)
            or not pytree.is_container(value)
            or (type(value) is tuple and not value)
        ):
            continue
        if id(value) in seen:
            several.add(id(value))
        else:
            seen[id(value)] = value  # kept, so that no other one gets its address
            todo += [member for _, member in pytree.children(value)]
    return frozenset(several)


def _own(source: Source, former: Mapping[int, Any]) -> OwnContainer:
    if source.kind == "root" and source.parent is None:  # found by name in every call, so it is not kept alive
        return OwnContainer(None, source.path)
    return OwnContainer(effect_slot(source, None, former), None)
