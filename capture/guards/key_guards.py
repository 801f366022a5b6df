"""Key guards: the parts of a call's key that do not come from its arguments, as conditions for the fast path.

What a function's code names, and switches of modules. Nothing is kept alive: objects are expected weakly.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from capture.guards.guard import Guard, Referent
from capture.key.code_names import MISSING, NamedSource
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Switches
from capture.state.source import Source
from capture.torch_private.distributed import progress_of

SAME = (PLAIN_TYPES - {slice}) | {types.BuiltinFunctionType, type, type(MISSING)}
"""The same object of these types has the same key."""
_WEAKLY = (types.FunctionType, torch.nn.Module, torch.Tensor)
"""So has one of these, as long as its class is not replaced, and a tensor needs a gradient or not as it did."""


def has_guard(value: Any) -> bool:
    """A guard can tell whether a name has this value."""
    return type(value) in SAME or isinstance(value, _WEAKLY)


def call_guard(read: Callable[[], Any], expected: Any, path: str) -> Guard:
    """A function gives this value."""
    return Guard("value", Source("call", read, None, path), expected)


def named_guard(value: Any, named: NamedSource) -> Guard:
    """A name has this very value."""
    match named.holder:
        case _ if value is MISSING:
            source = Source("call", named.read, None, named.name or "a name")
        case dict() as table:
            source = Source("item", table, named.name, named.name)
        case types.CellType() as cell:
            source = Source("closure", cell, None, named.name or "a closure cell")
        case weakref.ref() as holder:
            source = Source("weak", holder, named.name, f"self.{named.name}")
        case _:
            source = Source("call", named.read, None, named.name or "a name")
    if isinstance(value, _WEAKLY):
        return Guard("object", source, Referent.of(value))
    return Guard("value", source, value)


def switch_guards(switches: Switches) -> list[Guard]:
    """Switches of modules are as they are now."""
    owns, weak, sharded = switches
    found = [
        Guard("value", Source("item", own, name, f"a module's {name}"), own[name]) for own, name in owns if name in own
    ]
    for reference, name in weak:
        module = reference()
        if name in module.__dict__:
            found.append(Guard("value", Source("weak", reference, name, f"a module's {name}"), module.__dict__[name]))
        else:
            found.append(call_guard(_attribute_reader(reference, name), getattr(module, name), f"a module's {name}"))
    return found + [
        call_guard(_progress_reader(one, progress_of(one())), True, "what fully_shard is about to do")
        for one in sharded
    ]  # fmt: skip


def _attribute_reader(reference: weakref.ref[Any], name: str) -> Callable[[], Any]:
    return lambda: getattr(reference(), name)


def _progress_reader(reference: weakref.ref[Any], known: Any) -> Callable[[], bool]:
    return lambda: bool(progress_of(reference()) == known)
