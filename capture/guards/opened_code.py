"""How a walk goes into functions, classes and modules."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import Any

from capture.guards.guard import Guard, itself, looked_up
from capture.guards.names_used import OF_ALL_CLASSES, place_of
from capture.guards.read_walk import (
    CLOSED,
    HANDLE,
    ReadWalk,
    always,
    and_wrapped,
    opens_of_library,
)
from capture.key.attributes import HEAP, IMMUTABLE, MISSING, dict_of
from capture.key.packages import is_installed, is_library, module_of, name_of, package_of
from capture.key.pytree import PLAIN_TYPES
from capture.native import native
from capture.state.source import Source
from capture.torch_private.dynamo import COMPILERS
from capture.torch_private.hook_numbers import counters_of

_OF_ALL_MODULES = frozenset({"__builtins__", "__spec__", "__loader__", "__cached__"})
_PARTS_OF_FUNCTIONS = frozenset({"__closure__", "__defaults__", "__kwdefaults__", "__code__"})
"""Code that names one of these may look into functions that do not run."""
_NAMES = frozenset({types.ModuleType, dict})
_COMPILED = "_torchdynamo_orig_callable"
"""In the ``__dict__`` of a function that ``torch.compile`` made; without it, its globals and cells are not guarded."""


def open_function(walk: ReadWalk, value: types.FunctionType, path: str) -> None:
    """Go into a function: its code and defaults, and its closure cells if it ran."""
    if HANDLE in value.__dict__:
        walk.enter(getattr(value.__dict__[HANDLE], "function", None), path)
    if _COMPILED in value.__dict__:
        _enter_compiled(walk, value, path)
    package = package_of(value.__module__)
    own_names = walk.names.by_package.get(package, set())
    if not is_library(package) or not own_names.isdisjoint(value.__dict__):
        _attributes_of_function(walk, value)
    if not is_library(package):
        walk.note_definition(value)
        if "__annotations__" in walk.names.of_definitions:
            walk.enter_value(value.__annotations__, f"{value.__qualname__}.__annotations__")
    is_inlined = bool(walk.names.compiled) and not is_library(package)  # or may be: the compiled code says no more
    is_asked = not _PARTS_OF_FUNCTIONS.isdisjoint(walk.names.of_packages(["inspect"]))
    if value.__code__ not in walk.names.codes and not is_inlined and not is_asked:
        return
    walk.functions.append(value)
    for default in (*(value.__defaults__ or ()), value.__kwdefaults__ or {}):
        walk.enter_value(default, f"a default of {value.__qualname__}")
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
        if id(cell) not in walk.seen:
            walk.seen.add(id(cell))
            walk.kept.append(cell)
            open_cell(walk, cell, f"{value.__qualname__}:{name}" if path else name, name)


def _attributes_of_function(walk: ReadWalk, value: types.FunctionType) -> None:
    """Attributes that were set on a function itself. The ``__dict__`` of a captured function is left out, as a guard
    would keep the function alive."""
    made_by = package_of(value.__globals__.get("__name__"))  # a wrapper says that it is of another module
    wanted, own = walk.names.of_packages([package_of(value.__module__), made_by]), value.__dict__
    wanted -= {HANDLE, _COMPILED, *walk.always_set(id(value))}
    names, kept, kinds = walk.columns(id(value), own, wanted, value.__qualname__)
    holder: Any = weakref.ref(value) if HANDLE in own else own
    source = itself(holder, value.__qualname__)
    walk.add(looked_up(source, wanted, names, kept, kinds), weakref.ref(value))


def _enter_compiled(walk: ReadWalk, value: types.FunctionType, path: str) -> None:
    """Go into the function that was given to ``torch.compile``. What ran in its place has to be the function itself, as
    after ``torch.compiler.disable``, or code whose guards are known."""
    walk.enter(value.__dict__[_COMPILED], path)
    codes = [getattr(one, "__code__", None) for one in and_wrapped(value.__dict__[_COMPILED])]
    written = {place_of(code): code for code in codes if type(code) is types.CodeType}
    for code in walk.names.codes:
        if place_of(code) in written and code != written[place_of(code)] and code not in walk.names.compiled:
            walk.found.obstacle = ("compiled code whose guards torch does not show", path or value.__qualname__)


def open_cell(walk: ReadWalk, cell: types.CellType, path: str, name: str = "cell_contents") -> None:
    """Go into a closure cell. ``name``: what code calls what it holds."""
    try:
        held = cell.cell_contents
    except ValueError:
        read = functools.partial(_is_empty, cell)
        walk.found.guards.append(Guard("value", Source("call", read, None, path), True))
        return
    if issubclass(type(held), types.ModuleType):
        walk.packages.add(package_of(name_of(held)))
    walk.guard_place((id(cell), None), held, Source("closure", cell, None, path), name)


def open_class(walk: ReadWalk, kind: type, _: str) -> None:
    """Go into a class: what code can have read of it, directly or through its instances."""
    module: Any = module_of(kind)
    if kind.__flags__ & (HEAP | IMMUTABLE) != HEAP or package_of(module) in CLOSED:
        return
    if type(module) is str and module.startswith(COMPILERS):
        return
    for base in kind.__mro__[1:-1]:
        walk.enter(base, base.__qualname__)
    wanted = walk.names.of_own_class(kind)
    if walk.names.is_computed and not is_library(package_of(kind.__module__)):
        wanted |= frozenset(kind.__dict__) - OF_ALL_CLASSES
        walk.found.guards.append(Guard("length", itself(kind.__dict__, kind.__qualname__), len(kind.__dict__)))
    if walk.names.matches:
        walk.more_names.update(name for name in kind.__dict__.get("__match_args__", ()) if type(name) is str)
    if not is_library(package_of(module)):
        walk.note_definition(kind)
        if "__subclasses__" in walk.names.of_definitions:
            below: list[type] = type.__subclasses__(kind)
            for subclass in below:
                walk.enter(subclass, subclass.__qualname__)
    if kind.__dict__.get("_is_protocol") is True:  # ``isinstance`` looks for its members
        walk.more_names.update(subclass for subclass in {*kind.__dict__, *_annotated(kind)} if subclass[:1] != "_")
    walk.classes.append(kind)
    counters, users = counters_of(kind), walk.names.of_packages(())
    walk.compare_as_it_is(id(kind), counters & users)
    wanted -= walk.always_set(id(kind)) | (counters - users)
    names, kept, kinds = walk.columns(id(kind), kind.__dict__, wanted, kind.__qualname__, kind)
    walk.add(looked_up(itself(kind, kind.__qualname__), wanted, names, kept, kinds), lambda: kind)
    _attributes_of_metaclass(walk, kind)


def _annotated(kind: type) -> list[str]:
    held = kind.__dict__.get("__annotations__")  # noqa: RUF063 - inspect's function would run code of a metaclass
    return [one for one in held if type(one) is str] if type(held) is dict else []


def _attributes_of_metaclass(walk: ReadWalk, kind: type) -> None:
    if type(kind) is not type:
        metaclass: type = type(kind)
        for one in metaclass.__mro__:
            if one not in (type, object):
                walk.enter(one, one.__qualname__)


def open_module(walk: ReadWalk, module: types.ModuleType, path: str) -> None:
    """Go into a module: what users' code reads of it."""
    namespace, package = native.own_dict(module), package_of(name_of(module))
    users, wanted = walk.names.of_packages(()), walk.names.of_packages([package])
    if is_library(package):
        for name in users & namespace.keys():
            if type(namespace[name]) is types.BuiltinFunctionType:
                walk.note_in_c(namespace[name])
    if package in CLOSED:
        return
    prefix = f"{name_of(module)}."
    if is_library(package):
        names = {name for name in wanted if name in namespace} | (walk.names.asked - namespace.keys())
        walk.guard_members(
            namespace,
            sorted(names),
            prefix,
            lambda name, value: name in users and (opens_of_library(name, value) or _is_asked(value, users)),
        )
        if type(module) is not types.ModuleType:
            computed = dir(type(module)) if walk.names.is_computed else ()
            _given_by_class(walk, module, (users | {*computed}) - namespace.keys(), prefix)
        return
    wanted |= {"__getattr__"}  # looked up where a name is absent
    walk.note_class(module)
    walk.guard_members(namespace, sorted(wanted - _OF_ALL_MODULES), prefix, always)
    if walk.names.is_computed:
        unnamed = namespace.keys() - OF_ALL_CLASSES - wanted - _OF_ALL_MODULES
        walk.guard_members(namespace, sorted(unnamed), prefix, _leads_on)
        walk.found.guards.append(Guard("length", itself(namespace, name_of(module)), len(namespace)))


def _leads_on(_: str, value: Any) -> bool:
    """Whether to go into a member that only code with computed names can have read. Not into the other packages that a
    module imports: from one to the next they lead to all that are installed."""
    return not (issubclass(type(value), types.ModuleType) and is_installed(value))


def _is_asked(value: Any, users: frozenset[str]) -> bool:
    """Whether users' code may ask an object of a library for a plain value, as a package's settings are."""
    own = dict_of(value)
    return own is not None and any(type(own.get(name)) in PLAIN_TYPES for name in users & own.keys())


def _given_by_class(walk: ReadWalk, module: types.ModuleType, wanted: Iterable[str], prefix: str) -> None:
    """Values of names that a module does not have itself, while its class, a module behind it or a table in it does, as
    for torch's modules of switches and configs. None for a module that makes a value when it is asked, such as
    ``torch.ops``."""
    held = vars(module).values()
    behind = [vars(value) if type(value) is types.ModuleType else value for value in held if type(value) in _NAMES]
    names = set().union(*map(vars, type(module).__mro__[:-2]), *behind)
    for name in sorted(names.intersection(wanted)):
        value = MISSING if name[:2] == "__" else getattr(module, name, MISSING)
        if type(value) in PLAIN_TYPES:
            read = functools.partial(getattr, module, name, MISSING)
            walk.found.guards.append(Guard("value", Source("call", read, None, f"{prefix}{name}"), value))
        elif value is not MISSING and opens_of_library(name, value):
            walk.enter_value(value, f"{prefix}{name}")


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return True
    return False
