"""Key guards: the parts of a call's key that do not come from its arguments, as conditions for the fast path.

These are the names in a function's code, and the switches of modules. Expected objects are held by weak references. One
that takes none, such as a list or dict, is kept alive as long as the fast path.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from capture.guards.guard import Guard, Referent
from capture.key.code_names import MISSING, SMALL, NamedSource, is_by_value
from capture.key.left_objects import Left
from capture.key.numpy_arrays import FROZEN, is_array_type
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import NEVER_WEAKLY, Switches
from capture.state.source import Source, lasting_place
from capture.torch_private.distributed import progress_of

SAME = (PLAIN_TYPES - {slice}) | {types.BuiltinFunctionType, type, type(MISSING)}
"""Types of which the same object always has the same part of the key."""
_WEAKLY = (types.FunctionType, torch.nn.Module, torch.Tensor)
"""The same holds for these while the object keeps its class, and a tensor its ``requires_grad``."""


def call_guard(read: Callable[[], Any], expected: Any, path: str) -> Guard:
    """A guard on what a function returns."""
    return Guard("value", Source("call", read, None, path), expected)


def named_guards(value: Any, named: NamedSource) -> list[Guard] | None:
    """Guards on the values of names; on the members of a small list or dict. None where guards cannot compare what the
    key does: a value that is compared by its content, other than plain members."""
    if type(value) is Left:
        return None
    return _along(named) if named.attributes else _guards_on(value, _source_of(value, named))


def _guards_on(value: Any, source: Source) -> list[Guard] | None:
    kind = type(value)
    if kind in SAME or (kind is tuple and all(type(member) in SAME for member in value)):
        return [Guard("value", source, value)]
    if is_by_value(value):
        guards = [Guard("value", source, value)]
        if len(value) > SMALL:  # the key has its identity
            return guards
        members = tuple(value.values() if kind is dict else value)
        if not all(type(member) in SAME for member in (*value, *members)):
            return None
        kinds = (None,) * len(members)
        expected = (tuple(value), members, kinds) if kind is dict else (members, kinds)
        whole: Any = "table" if kind is dict else "sequence"
        return [*guards, Guard(whole, Source("root", value, kind, source.path), expected)]
    others = (tuple, *NEVER_WEAKLY)
    if not issubclass(kind, _WEAKLY) and (kind in FROZEN or is_array_type(kind) or issubclass(kind, others)):
        return None
    try:
        return [Guard("object", source, Referent.of(value))]
    except TypeError:  # no weak references: the path keeps it alive
        return [Guard("value", source, value)]


def _along(named: NamedSource) -> list[Guard] | None:
    """Guards that each object on the way to the last attribute is the same, and itself keeps the next attribute. None
    where an attribute is kept elsewhere, as in a class."""
    assert named.root is not None
    value, above = named.root.read(), list[Guard]()
    source = None if named.root.holder is None else _source_of(value, named.root)  # None: a path has one receiver
    for name in named.attributes:
        path = f"{source.path}.{name}" if source is not None else f"self.{name}"
        place = None if issubclass(type(value), type) else lasting_place(value, name, path)
        if place is None:
            return None
        if source is not None:
            guards = _guards_on(value, source)
            if guards is None:
                return None
            above += guards
        source, value = place, place.get()
    assert source is not None
    last = _guards_on(value, source)
    return None if last is None else above + last


def _source_of(value: Any, named: NamedSource) -> Source:
    match named.holder:
        case _ if value is MISSING:
            return Source("call", named.read, None, named.name or "a name")
        case dict() as table:
            return Source("item", table, named.name, named.name)
        case types.CellType() as cell:
            return Source("closure", cell, None, named.name or "a closure cell")
        case weakref.ref() as holder:
            path = f"self.{named.name}"
            return lasting_place(holder(), named.name, path) or Source("weak", holder, named.name, path)
        case _:
            return Source("call", named.read, None, named.name or "a name")


def switch_guards(switches: Switches) -> list[Guard]:
    """Guards that the switches of modules are as they are now."""
    owns, weak, sharded = switches
    guards = [
        Guard("value", Source("item", own, name, f"a module's {name}"), own[name]) for own, name in owns if name in own
    ]
    for reference, name in weak:
        module = reference()
        if module is None:  # another one took its place
            continue
        if name in module.__dict__:
            guards.append(Guard("value", Source("weak", reference, name, f"a module's {name}"), module.__dict__[name]))
        else:
            read = _attribute_reader(reference, name)
            guards.append(call_guard(read, read(), f"a module's {name}"))
    return guards + [
        call_guard(_progress_reader(owner, progress_of(owner())), True, "what fully_shard is about to do")
        for owner in sharded
    ]  # fmt: skip


def _attribute_reader(reference: weakref.ref[Any], name: str) -> Callable[[], Any]:
    return lambda: getattr(reference(), name, None)


def _progress_reader(reference: weakref.ref[Any], known: Any) -> Callable[[], bool]:
    return lambda: bool(progress_of(reference()) == known)
