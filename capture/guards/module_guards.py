"""Module guards: the modules that a recording relies on are as they were, beside their tensors.

Submodules, hooks, ``forward`` and plain values that the body read, of objects near it, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen

from capture.guards.guard import Guard, itself, members
from capture.key.code_names import MISSING, same_value
from capture.state.attribute_reads import Reads, near_objects
from capture.state.snapshot import Snapshot
from capture.state.source import Source


@frozen
class Value:
    """An attribute of a module, or of an object, as it was; ``kept``: see there."""

    holder: weakref.ref[Any]
    name: str
    path: str
    kept: Any

    def is_other(self) -> bool:
        """It is another value now."""
        holder = self.holder()
        now = MISSING if holder is None else kept(holder.__dict__.get(self.name, MISSING))
        return not (same_value(now, self.kept) or (type(now) is tuple and now == self.kept))


def kept(value: Any) -> Any:
    """A value, or what was in a list or dict then."""
    return tuple(value.items()) if type(value) is dict else tuple(value) if type(value) is list else value


def module_ids(before: Snapshot) -> tuple[int, ...]:
    """``id`` of the attributes of each module: guards keep those alive, so that they stay unique."""
    return tuple([id(module.__dict__) for module in before.modules])


def _modules(before: Snapshot) -> Iterator[tuple[torch.nn.Module, str]]:
    """All modules, with their paths."""
    return zip(before.modules, [source.path for source, _ in before.tables], strict=True)


def values_of(before: Snapshot, reads: Reads) -> list[Value]:
    """The values that bodies read, as they are now."""
    found = []
    for holder, path in (*_modules(before), *near_objects(before)):
        absent, there = reads.of(holder)
        pairs = [*((name, MISSING) for name in absent), *there]
        found += [Value(weakref.ref(holder), name, f"{path}.{name}", kept(one)) for name, one in pairs]
    return found


def _of_module(module: torch.nn.Module, path: str, reads: Reads) -> list[Guard]:
    """What the body reads of a module beside tensors and submodules, and its own ``forward``."""
    own = module.__dict__
    absent, there = reads.of(module)
    if "forward" in own:  # a captured instance, which its own __dict__ would keep alive
        held = weakref.ref(module)
        found = [Guard("present", Source("weak", held, "forward", f"{path}.forward"))]
        values = [(name, value) for name, value in there if name != "forward"]
        found += [Guard("value", Source("weak", held, name, f"{path}.{name}"), value) for name, value in values]
    elif not (absent or there):
        found = [Guard("absent", Source("item", own, "forward", f"{path}.forward"))]
    else:
        found = [members(own, path, ("forward", *absent), there)]
        tables = (module._parameters, module._buffers, module._modules) if absent else ()
        found += [members(table, path, absent, ()) for table in tables]
    return found + _of_members(there, path)


def _of_members(there: list[tuple[str, Any]], path: str) -> list[Guard]:
    """What is in the small lists and dicts among these values."""
    found = []
    for name, value in there:
        if type(value) in (dict, list):
            place = f"{path}.{name}"
            found.append(Guard("length", itself(value, place), len(value)))
            if type(value) is dict:
                found.append(members(value, place, (), value.items()))
            else:
                members_of = enumerate(value)
                found += [Guard("value", Source("item", value, at, f"{place}[{at}]"), one) for at, one in members_of]
    return found


def _of_tables(module: torch.nn.Module, path: str, empty: list[Any]) -> list[Guard]:
    """Its submodules, parameters and buffers that are None, and hooks. ``empty``: gets the containers without any."""
    found = []
    children = module._modules
    if children:
        found.append(Guard("length", itself(children, f"{path}._modules"), len(children)))
        found.append(members(children, f"{path}._modules", (), children.items()))
    for table in (module._parameters, module._buffers):
        absent = [key for key, value in table.items() if value is None]
        found += [Guard("value", Source("item", table, key, f"{path}.{key}")) for key in absent]
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if hooks:
            found.append(Guard("length", itself(hooks, f"forward hooks of {path}"), len(hooks)))
        else:
            empty.append(hooks)
    return found


def state_guards(before: Snapshot, reads: Reads) -> list[Guard]:
    """Guards on all modules and near objects that a body can reach."""
    forwards = {type(module): type(module).forward for module in before.modules}
    found = [
        Guard("value", Source("attribute", kind, "forward", f"{kind.__qualname__}.forward"), forward)
        for kind, forward in forwards.items()
    ]
    empty: list[Any] = []
    for module, path in _modules(before):
        found += _of_module(module, path, reads)
        found += _of_tables(module, path, empty)
    if empty:  # one guard for all is made and looked at fastest
        found.append(Guard("empty", itself(tuple(empty), "forward hooks")))
    for holder, path in near_objects(before):
        absent, there = reads.of(holder)
        if absent or there:
            found += [members(holder.__dict__, path, absent, there), *_of_members(there, path)]
    return found
