"""Read guards: what a body can have read of Python state is as it was.

For each object that is reached from the receiver, the arguments, the globals and the closure cells of code that ran,
every name in that code is looked up, in the object and in its classes. A guard is made of what is found, and of what is
not there. No code of a user's class runs meanwhile: dicts, slots and the MRO are followed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from capture.core.interrupts import let_through
from capture.guards.former_values import reached_by
from capture.guards.guard import Guard
from capture.guards.names_used import names_of
from capture.guards.opened_objects import opener_of
from capture.guards.read import Counted, Key, Read, Replaced, WalkBegin
from capture.guards.read_walk import ReadWalk, before_of, item_key
from capture.key.attributes import MISSING, dict_of, weak_or_none
from capture.key.objects import referent
from capture.key.pytree import PLAIN_TYPES, is_object
from capture.key.signature import NEVER_WEAKLY
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.effects import only_added_to, uses_of_names
from capture.state.snapshot import Change, Members, Snapshot
from capture.state.source import Source


def read_by(
    run: CodeRun, call: Call, changed: Iterable[Change], rebuilt: Sequence[tuple[Source, Any]],
    tensors: Collection[int], before: Snapshot,
) -> Read:  # fmt: skip
    """Guards on what the code that ran in this call can have read. ``changed``, ``rebuilt``: places and containers that
    the body changed. ``tensors``: see ``ReadWalk``. ``before``: the state that it began with."""
    add_unnoted(run, call)
    changed = [*changed]
    try:
        places, containers = changed_places(changed, rebuilt)
        counted, grown = only_added_to(before, run)  # another run does (``if step % 10 == 0: log.append(...)``)
        for source in counted:
            places.setdefault(_key_of(source), Counted(int))
        for container in grown:
            containers.setdefault(id(container), None)
        _count_arguments(call, places)
        former = functools.partial(reached_by, changed, rebuilt, before=before)
        read = _read_by(run, call, (places, containers), tensors, former)
    except Exception as error:  # noqa: BLE001 - a strange class of a user's, or a mistake of ours: never the caller's
        let_through(error)
        read = Read(obstacle=(f"state that cannot be followed ({type(error).__name__}: {error})", "self"))
    if read.obstacle is None and not run.is_complete:
        read.obstacle = ("what code runs below a profile function that the body sets", "self")
    read.begun_with = begins_with(run, call)
    if read.obstacle is not None:
        read.guards.append(Guard("value", Source("call", _never, None, read.obstacle[1]), True))
    return read


def _count_arguments(call: Call, places: dict[Key, Any]) -> None:
    """Places that are arguments, in effect: another object, or number, in each call. Where formulas have one of the
    numbers, the others are theirs, too, also where this run puts something else there."""
    inputs, formulas = call.binder.places, call.formulas
    positions = range(len(call.values) - len(inputs), len(call.values))
    has_formulas = formulas is not None and any(
        formulas.has(position, place.path) for position, place in zip(positions, inputs, strict=True)
    )
    for place in inputs:
        before = before_of(places.get(place.key(), MISSING))
        if has_formulas and type(before) in (float, int):
            places[place.key()] = Counted(type(before))
        elif place.key() not in places:
            value = place.read()
            places[place.key()] = Counted(type(value)) if type(value) in (float, int) else value


def _read_by(
    run: CodeRun, call: Call, changed: tuple[dict[Key, Any], dict[int, Members | None]], tensors: Collection[int],
    former: Callable[..., Iterable[tuple[Any, str]]],
) -> Read:  # fmt: skip
    """A walk with all names; once more where objects that it met look up further names. ``former``: gives what is
    reached by values that the body replaced, but for these names."""
    more = set[str]()
    groups = {id(group) for group in call.optimizers.groups_of_islands()}
    while True:
        names, uses = names_of(run, more), uses_of_names(run)
        walk = ReadWalk(names, *changed, tensors, opener_of, counted=uses.only_counted(), by_name=groups)
        starts = [*starts_of(call), *former(set_only=names.set_only)]
        walk.begin(call.function, starts, [scope for scope, _ in names.scopes.values()])
        if walk.found.obstacle is not None or walk.more_names <= more:
            walk.found.has_compiled = bool(names.compiled)
            walk.found.guarded_tensors = frozenset(walk.found.tensors.intersection(tensors))
            walk.found.set_only = frozenset(names.set_only)
            return walk.found
        more |= walk.more_names


def add_unnoted(run: CodeRun, call: Call) -> None:
    """Add the functions of a call that are not noted when they run."""
    if isinstance(call.function, types.FunctionType):  # of a graph module's piece it is a function of ours
        run.add_function(call.function)
    for function in call.unseen_functions():
        run.add_function(function)


def begins_with(run: CodeRun, call: Call) -> WalkBegin:
    """What a walk begins with, once ``add_unnoted`` was called."""
    starts = [(start, path) for start, path in starts_of(call) if type(start) not in PLAIN_TYPES]  # those are no places
    references = [None if issubclass(type(start), NEVER_WEAKLY) else weak_or_none(start) for start, _ in starts]
    groups = [id(group) for group in call.optimizers.groups_of_islands()]
    generators = [leaf for leaf in call.leaves if issubclass(type(leaf), torch.Generator)]
    return WalkBegin(
        codes=frozenset([(id(code), id(scope)) for code, scopes in run.codes.items() for scope in scopes]),
        starts=tuple([(id(start), path) for start, path in starts]),
        others=(id(call.function), run.is_complete, run.lookups(), *groups),
        run=id(run),
        is_of_one_run=bool(call.binder.places or groups or generators) or None in references,
        kept=(call.function, *[(code, *scopes) for code, scopes in run.codes.items()]),
        references=tuple([reference for reference in references if reference is not None]),
    )


def _never() -> bool:
    return False


def starts_of(call: Call) -> list[tuple[Any, str]]:
    """The receiver, and objects among the arguments that are the same in each call with the key. Opened arguments are
    other objects in each call: of them the classes."""
    named = [] if call.receiver is None else [(call.receiver, "self")]
    opened = [value for _, value in call.containers() if is_object(type(value))]
    others = {id(value) for value in opened}
    for path, leaf in call.all_leaves():
        if not issubclass(type(leaf), torch.Tensor) and id(referent(leaf)) not in others:
            named.append((leaf, path))
    named += [(kind, kind.__qualname__) for kind in dict.fromkeys([*map(type, opened), *call.classes()])]
    return [*named, *call.further_starts(), *call.unreached.starts()]


def path_read(read: Read, changes: Iterable[Change]) -> str | None:
    """A path among these changes that guards are about: code may have read the value from before the change."""
    for change in changes:
        if any(_is_about(guard, change) for guard in read.guards):
            return change.source.path
    return None


def _is_about(guard: Guard, change: Change) -> bool:
    place = change.source.get() if change.container else change.source.holder
    ids = {id(place), id(place if change.container else dict_of(place))} - {id(None)}
    holder, name = guard.source.holder, change.source.name
    if guard.kind == "empty":
        return any(id(holder_of_part) in ids for holder_of_part in holder)
    if guard.kind in _OF_MANY or id(holder) not in ids:
        return False
    if change.container or guard.kind in ("table", "sequence"):
        return True
    if guard.kind == "length":
        return change.before is MISSING or change.after is MISSING
    if guard.kind in ("members", "names"):
        there = [item[0] for item in guard.expected[1]] if guard.kind == "members" else guard.expected[1]
        return name in guard.expected[0] or name in there
    return bool(guard.source.name == name)


_OF_MANY = ("functions", "bases", "classes", "definitions")


def changed_places(
    changed: Iterable[Change], rebuilt: Sequence[tuple[Source, Any]]
) -> tuple[dict[Key, Any], dict[int, Members | None]]:
    """The places that a body gave other values, and containers whose members it changed."""
    places: dict[Key, Any] = {}
    containers: dict[int, Members | None] = {}
    for change in changed:
        if change.container:
            is_guarded = change.members is not None and not change.members.is_free
            containers[id(change.source.get())] = change.members if is_guarded else None
        elif change.amount is not None or (change.is_read_anew and change.before is not MISSING):
            places[_key_of(change.source)] = Counted(type(change.before))
        elif change.is_read_anew or change.after is not MISSING:
            places[_key_of(change.source)] = Replaced(change.before)
        else:
            places[_key_of(change.source)] = change.before
    return places | {_key_of(source): before for source, before in rebuilt}, containers


def _key_of(source: Source) -> Key:
    holder = source.holder
    if source.kind == "item":
        return item_key(holder, source.name)
    return id(holder.__dict__) if type(holder) is types.ModuleType else id(holder), source.name
