"""Module checks: are the modules that a recording relies on as they were, beside their tensors?

Conditions on submodules, hooks, ``forward`` and plain values that the body read, of objects near it, too, as text for
the check.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen

from capture._attribute_reads import Reads, near_objects
from capture._named import MISSING, same_value
from capture._state import Snapshot

Name = Callable[[Any], str]
"""Gives a value a name in the scope of the check."""


def has(own: dict[str, Any], wanted: tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]) -> bool:
    """A dict has none of some names, and these values."""
    absent, there = wanted
    for name in absent:
        if name in own:
            return False
    for name, value in there:  # loops: generators take three times as long
        found = own[name]
        if found is not value and not same_value(found, value):
            return False
    return True


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
    """``id`` of the attributes of each module: a check keeps those alive, so that they stay unique."""
    return tuple([id(module.__dict__) for module in before.modules])


def values_of(before: Snapshot, reads: Reads) -> list[Value]:
    """The values that bodies read, as they are now."""
    found = []
    modules = zip(before.modules, [place.path for place, _ in before.tables], strict=True)
    for holder, path in (*modules, *near_objects(before)):
        absent, there = reads.of(holder)
        pairs = [*((name, MISSING) for name in absent), *there]
        found += [Value(weakref.ref(holder), name, f"{path}.{name}", kept(one)) for name, one in pairs]
    return found


def _of_values(name_of: Name, module: torch.nn.Module, reads: Reads) -> list[str]:
    """Conditions on what the body reads of a module beside tensors and submodules, and on its own ``forward``."""
    own = module.__dict__
    absent, there = reads.of(module)
    if "forward" in own:  # a captured instance, which its own __dict__ would keep alive
        held = f"{name_of(weakref.ref(module))}().__dict__.get"
        terms = [f"{held}('forward') is not None"]
        terms += [f"{held}({name!r}, MISSING) is {name_of(value)}" for name, value in there if name != "forward"]
    elif not (absent or there):
        terms = [f"'forward' not in {name_of(own)}"]  # in a third of the time, without C
    else:
        terms = [_has(name_of, own, ("forward", *absent), there)]
        tables = (module._parameters, module._buffers, module._modules) if absent else ()
        terms += [_has(name_of, table, absent, ()) for table in tables]
    return terms + _of_members(name_of, there)


def _has(name_of: Name, own: dict[Any, Any], absent: Iterable[str], there: Iterable[tuple[Any, Any]]) -> str:
    return f"has({name_of(own)}, {name_of((tuple(absent), tuple(there)))})"


def _of_members(name_of: Name, there: list[tuple[str, Any]]) -> list[str]:
    """Conditions on what is in the small lists and dicts among these values."""
    terms = []
    for _, value in there:
        if type(value) in (dict, list):
            table = name_of(value)
            terms.append(f"len({table}) == {len(value)}")
            if type(value) is dict:
                terms.append(_has(name_of, value, (), value.items()))
            else:
                terms += [f"{table}[{index}] is {name_of(one)}" for index, one in enumerate(value)]
    return terms


def conditions(name_of: Name, before: Snapshot, reads: Reads) -> list[str]:
    """One for each module, and a few for all."""
    found = []
    forwards = {type(module): type(module).forward for module in before.modules}
    if forwards:
        found.append(" and ".join(f"{name_of(kind)}.forward is {name_of(f)}" for kind, f in forwards.items()))
    without = []  # a tuple of empty dicts is looked at fastest
    for module in before.modules:
        terms = _of_values(name_of, module, reads)
        children = name_of(module._modules) if module._modules else ""
        if children:
            terms.append(f"len({children}) == {len(module._modules)}")
            terms += [f"{children}[{k!r}] is {name_of(v)}" for k, v in module._modules.items()]
        for table in (module._parameters, module._buffers):
            absent = [key for key, value in table.items() if value is None]
            if absent:
                name = name_of(table)
                terms += [f"{name}[{key!r}] is None" for key in absent]
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if hooks:
                terms.append(f"len({name_of(hooks)}) == {len(hooks)}")
            else:
                without.append(hooks)
        found.append(" and ".join(terms))
    if without:
        found.append(f"not any({name_of(tuple(without))})")
    for holder, _ in near_objects(before):
        absent, there = reads.of(holder)
        if absent or there:
            terms = [_has(name_of, holder.__dict__, absent, there), *_of_members(name_of, there)]
            found.append(" and ".join(terms))
    return found
