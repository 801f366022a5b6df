"""What a body left in Python state, as something that a replay can do again.

A place that got another value gets a value like it. A number that the body only adds to is added to, whatever it is
then; a list that the body only appends to gets the new members at its end. The members of any other container are
guarded, so that its members after the body are known, too.
"""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from attrs import evolve, field

from capture.core.data import define
from capture.key.asked_names import beginnings
from capture.key.attributes import plain_class
from capture.key.name_uses import ADDING, name_uses
from capture.key.packages import is_library, package_of
from capture.key.pytree import PLAIN_TYPES
from capture.state.amounts import Amounts
from capture.state.code_run import CodeRun
from capture.state.diff import content_before
from capture.state.diff import put_members as put_members
from capture.state.snapshot import Change, Members, Snapshot, place_key
from capture.state.source import Source

_ORDERED = (list, deque)
_PLAIN_DICTS = (dict, OrderedDict, defaultdict, Counter)


@define(eq=False)
class UsesOfNames:
    """What all code of a run did with the values of names, by the package of the code; the package of users' code is
    empty."""

    read: dict[str, set[Any]] = field(factory=dict)
    """Names, and names with a constant key, whose values something depends on."""
    counted: set[Any] = field(factory=set)
    grown: set[str] = field(factory=set)
    asked: set[Any] = field(factory=set)
    """Names that are asked for items by a method (``NameUses.asked``)."""
    filled_anyhow: set[str] = field(factory=set)
    """Names in which users' code puts values by keys that are not constants."""
    called: set[str] = field(factory=set)
    """Names of attributes that users' code calls."""
    is_computed: bool = False
    """Users' code looks up names that may be any."""
    begins: set[str] = field(factory=set)
    """What names begin with that users' code looks up by texts which it computes."""

    def is_read(self, name: Any, packages: Iterable[str]) -> bool:
        """Whether something depends on the value, in code that may look the name up in objects of these packages."""
        return any(name in self.read.get(one, ()) for one in {"", *packages}) or self._is_asked_by_text(name)

    def _is_asked_by_text(self, name: Any) -> bool:
        return type(name) is str and name.startswith(tuple(self.begins))

    def is_read_whole(self, name: Any) -> bool:
        """The same for users' code, and what holds it: the name of an item of an item is a pair of a name and a key."""
        return self.is_read(name, ()) or (type(name) is tuple and self.is_read_whole(name[0]))

    def may_ask(self, name: Any, value: Any) -> bool:
        """Whether a method of the value may look at all that it holds."""
        return name in self.asked and type(value) not in _PLAIN_DICTS

    def is_filled_anyhow(self, name: Any) -> bool:
        """Whether values may be put under any key in what has the name, or is in it."""
        while type(name) is tuple:
            if name[0] in self.filled_anyhow:
                return True
            name = name[0]
        return name in self.filled_anyhow

    def only_counted(self) -> frozenset[str]:
        """Names that users' code adds to and does nothing else with."""
        found = self.counted - self.read.get("", set()) - self.called if not self.is_computed else set()
        return frozenset([name for name in found if not self._is_asked_by_text(name)])

    def has_items_read(self, name: Any) -> bool:
        """Whether something depends on a member of what has this name, or on what is in one."""
        return any(_is_below(read, name) for reads in self.read.values() for read in reads)


def _is_below(item: Any, name: Any) -> bool:
    while type(item) is tuple:
        item = item[0]
        if item == name:
            return True
    return False


def uses_of_names(ran: CodeRun) -> UsesOfNames:
    """The uses in all code that ran."""
    all_uses, set_anew = UsesOfNames(), dict[str, set[Any]]()
    for code, scopes in ran.codes.items():
        uses = name_uses(code)
        all_uses.counted |= uses.counted | uses.items_updated
        all_uses.grown |= uses.grown
        all_uses.asked |= uses.asked
        all_uses.filled_anyhow |= uses.filled_anyhow
        all_uses.called |= uses.called
        for scope in scopes:
            package = package_of(scope.get("__name__"))
            owner = package if is_library(package) else ""
            all_uses.read.setdefault(owner, set()).update(uses.read, uses.items_read)
            set_anew.setdefault(owner, set()).update(uses.set_anew)
            all_uses.begins |= beginnings(code, scope) if not owner else frozenset()
    all_uses.is_computed = "" in all_uses.begins
    for owner, names in set_anew.items():  # what a run makes of such a number may be no sum with it
        all_uses.read[owner] |= names & all_uses.counted
    return all_uses


def classified(
    before: Snapshot, changes: Sequence[Change], ran: CodeRun | None, amounts: Amounts | None = None
) -> list[Change]:  # fmt: skip
    """The changes, each with how a replay does it again. ``ran``: the code of the run, as far as it is known.
    ``amounts``: what is known to be added to numbers (``Call.amounts``)."""
    if amounts is not None:
        with_amounts = [change if change.container else evolve(change, amount=amounts(change)) for change in changes]
        added = [change for change in with_amounts if change.amount is not None]
        left = [change for change in with_amounts if change.amount is None]
        return _once([*added, *classified(before, left, ran)])
    counting = any(type(change.before) is int and type(change.after) is int for change in changes)
    if not counting and not any(change.container for change in changes):
        return list(changes)
    uses = uses_of_names(ran) if ran is not None else UsesOfNames(is_computed=True)
    effects, covered = [], set[int]()
    by_place = {id(change.source.holder) for change in changes if change.source.kind == "item"}
    for change in changes:
        if change.container and (members := _members(before, change, uses)) is not None:
            if _is_told_by_places(members, by_place):
                continue
            covered.add(id(members.container))
            change = evolve(change, members=members, after=members.new)
        effects.append(change)
    effects = [
        one for one in effects if one.container or one.source.kind != "item" or id(one.source.holder) not in covered
    ]
    return _once([_counted(before, effect, uses) for effect in effects])


def _once(changes: Sequence[Change]) -> list[Change]:
    """Where the code reaches one number in two ways, it is added to once."""
    kept, seen = [], set()
    for change in changes:
        key = place_key(change.source)
        if change.amount is None or key not in seen:
            kept.append(change)
        seen.add(key)
    return kept


def _counted(before: Snapshot, change: Change, uses: UsesOfNames) -> Change:
    """Numbers that the body added to and on which nothing else depends."""
    numbers = type(change.before) is int and type(change.after) is int
    if numbers and not uses.is_computed and is_only_counted(before, change.source, uses):
        return evolve(change, amount=change.after - change.before)
    return change


def is_only_counted(before: Snapshot, source: Source, uses: UsesOfNames) -> bool:
    """Whether the number in this place is only added to, and nothing else depends on it."""
    if _is_member(before, source):
        return type(source.name) in PLAIN_TYPES and _is_item_counted(before, source, uses)
    name, packages = _name_and_packages(source)
    return name in uses.counted and not uses.is_read(name, packages)


def is_unread(before: Snapshot, source: Source, uses: UsesOfNames) -> bool:
    """Whether nothing depends on what is in this place: the body puts something there, and does not add to it."""
    if uses.is_computed:
        return False
    if _is_member(before, source):
        key, names = source.name, names_holding(before, source.holder)
        return type(key) in PLAIN_TYPES and bool(names) and not any(
            (name, key) in uses.counted or uses.is_read_whole((name, key)) or uses.may_ask(name, source.holder)
            for name in names
        )  # fmt: skip
    name, packages = _name_and_packages(source)
    return name not in uses.counted and not uses.is_read(name, packages)


def _is_member(before: Snapshot, source: Source) -> bool:
    """Whether the place is in a container. Code reads those of a thread-local as attributes."""
    return source.kind == "item" and id(source.holder) not in before.namespaces


def _name_and_packages(source: Source) -> tuple[Any, list[str]]:
    """The name by which code reads a place, and the packages whose objects it may be looked up in."""
    if source.kind == "closure":
        return _name_of(source), []
    if source.kind == "global":
        return source.name, [package_of(source.holder.get("__name__"))]
    if source.kind in ("attribute", "slot"):
        kind = source.holder if issubclass(type(source.holder), type) else type(source.holder)
        return _name_of(source), [package_of(base.__module__) for base in kind.__mro__]
    return source.name, []


def _is_item_counted(before: Snapshot, source: Source, uses: UsesOfNames) -> bool:
    names, key, is_list = names_holding(before, source.holder), source.name, issubclass(type(source.holder), list)
    return bool(names) and all(
        (name, key) in uses.counted
        and not uses.is_read_whole((name, key))
        and not uses.has_items_read((name, key))
        and not uses.may_ask(name, source.holder)
        and not uses.is_filled_anyhow(name)
        and not (is_list and uses.has_items_read(name))
        for name in names
    )


def names_holding(before: Snapshot, value: Any, depth: int = 2) -> list[Any]:
    """The names under which the value is kept, of an item of a dict the pair of a name and the key; empty where it is
    also kept without a name."""
    names: dict[Any, None] = {}
    for source in _places_of(before, value):
        if source.kind == "root":
            return []
        name = _name_of(source)
        if type(name) is not str:
            return []
        if source.kind in ("attribute", "global", "closure"):
            names[name] = None
        elif source.kind == "item" and type(source.holder) in _PLAIN_DICTS and depth:
            holders = names_holding(before, source.holder, depth - 1)
            if not holders:
                return []
            names |= dict.fromkeys([(holder, name) for holder in holders])
        else:
            return []
    return list(names)


def _is_only_grown(before: Snapshot, container: Any, uses: UsesOfNames) -> bool:
    """Whether members are added at its end, and nothing else depends on its content."""
    places = list(_places_of(before, container))
    named = [place for place in places if not _is_of_method(place)]
    names = [_name_of(place) for place in named]
    if any(uses.may_ask(name, container) or uses.is_filled_anyhow(name) for name in names):
        return False
    grows = len(named) < len(places) or any(_name_of(one) in uses.grown or one.kind == "item" for one in named)
    return grows and not uses.is_read("__self__", ()) and all(_may_only_grow(before, one, uses) for one in named)


def only_added_to(before: Snapshot, ran: CodeRun) -> tuple[list[Source], list[Any]]:
    """Places of numbers, and containers, on which nothing depends: the code that ran may only add to the numbers and to
    the ends of the containers, also where this run did not."""
    uses = uses_of_names(ran)
    keys = {name[1] for name in uses.counted if type(name) is tuple}  # of items, as in ``history["loss"].append(...)``
    if uses.is_computed or not (keys or uses.counted or uses.grown):
        return [], []
    held = list(before.sources.values())
    for space in before.namespaces.values():
        members = zip(space.names, space.values, strict=True)
        held += [(space.place(name), value) for name, value in members if type(value) in (int, *_ORDERED)]
    numbers, containers = list[Source](), dict[int, Any]()
    for source, value in held:
        kind = type(value)
        if kind not in (int, *_ORDERED):
            continue
        name, named = _name_of(source), uses.counted if kind is int else uses.grown
        if name not in (keys if source.kind == "item" else named):
            continue
        if kind is not int and getattr(value, "maxlen", None) == len(value):
            continue  # one that is full may have got what it dropped, so that nothing shows
        if kind is not int:
            containers[id(value)] = value
        elif is_only_counted(before, source, uses):
            numbers.append(source)
    return numbers, [value for value in containers.values() if _is_only_grown(before, value, uses)]


def _may_only_grow(before: Snapshot, source: Source, uses: UsesOfNames) -> bool:
    name = _name_of(source)
    if source.kind == "item" and id(source.holder) not in before.namespaces:
        is_item = issubclass(type(source.holder), dict) and type(name) in PLAIN_TYPES
        return is_item and _is_item_counted(before, source, uses)
    packages = _own_packages(source.holder) if source.kind == "attribute" else ()
    return source.kind != "root" and not uses.is_read(name, packages) and not uses.has_items_read(name)


def _own_packages(holder: Any) -> list[str]:
    """Packages of Python's own whose code looks after the object's members, as a queue with a largest size does."""
    packages = [package_of(base.__module__) for base in type(holder).__mro__]
    return [package for package in packages if package in sys.stdlib_module_names]


def _name_of(source: Source) -> Any:
    if source.kind == "slot":
        return source.name.__name__
    return source.path.rpartition(":")[2].rpartition(".")[2] if source.kind == "closure" else source.name


def _is_of_method(source: Source) -> bool:
    """Whether it is the object of a bound method such as ``runs.append``: whoever has the method can only append."""
    return source.kind == "root" and source.parent is not None and _adds(source.parent.get())


def _adds(method: Any) -> bool:
    return type(method) is types.BuiltinFunctionType and method.__name__ in ADDING


def _places_of(before: Snapshot, value: Any) -> Iterator[Source]:
    yield from [source for source, one in before.sources.values() if one is value]
    for space in before.namespaces.values():
        for name, one in zip(space.names, space.values, strict=True):
            if one is value:
                yield space.place(name)


def _members(before: Snapshot, change: Change, uses: UsesOfNames) -> Members | None:
    """How the members of a container came about; None where that is not known."""
    container = change.source.get()
    content = content_before(before, container)
    if content is None:
        return None
    keys, old = content
    is_dict = issubclass(type(container), dict)
    now = list(members_of(container)[1])
    places = {id(member): at for at, member in enumerate(old) if type(member) not in PLAIN_TYPES}
    recipe: list[int] = []
    new: list[Any] = []
    for member in now:
        at = places.get(id(member))
        recipe.append(-1 - len(new) if at is None else at)
        if at is None:
            new.append(member)
    made = Members(container, keys, tuple(old), tuple(dict.keys(container)) if is_dict else None, tuple(recipe), new)
    added = _added(container, old) if type(container) in _ORDERED and not uses.is_computed else []
    return evolve(made, new=added, is_free=True) if added and _is_only_grown(before, container, uses) else made


def _is_told_by_places(members: Members, by_place: Set[int]) -> bool:
    """Whether it is a deque of which as many places as before hold others, and more is done with it than to append."""
    container = members.container
    is_full = issubclass(type(container), deque) and len(members.recipe) == len(members.keys)
    return is_full and not members.is_free and id(container) in by_place


def _added(container: Any, old: Sequence[Any]) -> list[Any]:
    """The members that were added at its end, if nothing else happened. For a deque that may have dropped members at
    its begin this is decided by the members that are left."""
    now, count, most = list(members_of(container)[1]), len(old), getattr(container, "maxlen", None)
    if most is None or len(now) < most:
        same = len(now) > count and all(a is b for a, b in zip(now, old, strict=False))
        return now[count:] if same else []
    if len({*map(id, old)}) < len(old):
        return _added_of_new(now, old, most)
    for added in range(1, len(now) + 1):  # members that are objects of their own tell by how many they moved
        if _are_same(now, [*old, *now[len(now) - added :]][-most:]):
            return now[len(now) - added :]
    return []


def _added_of_new(now: list[Any], old: Sequence[Any], most: int) -> list[Any]:
    """The same where an object is there twice: those at the end that were not there before, and are no plain values."""
    old_ids = {id(member) for member in old}
    added = 0
    while added < len(now) and id(now[-1 - added]) not in old_ids and type(now[-1 - added]) not in PLAIN_TYPES:
        added += 1
    return now[len(now) - added :] if _are_same(now, [*old, *now[len(now) - added :]][-most:]) else []


def _are_same(members: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(members) == len(others) and all(a is b for a, b in zip(members, others, strict=True))


def put_at_end(container: Any, count: int, values: Sequence[Any]) -> None:
    """Append these members to a list or deque whose first ``count`` members stay."""
    if issubclass(type(container), list):
        list.__setitem__(container, slice(count, None), values)
        return
    while len(container) > count:
        deque.pop(container)
    deque.extend(container, values)


def members_of(container: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]]:
    """The keys of a dict (None for other containers), and the values."""
    if issubclass(type(container), dict):
        return tuple(dict.keys(container)), tuple(dict.values(container))
    return None, tuple(plain_class(container).__iter__(container))
