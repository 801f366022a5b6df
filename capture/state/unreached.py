"""Functions that ran in a body though nothing leads to them from what the body names.

A library has them: a handler of ``logging``, a conversion that was registered, ``__del__`` of an object that is gone.
Their code was seen to run; the collector knows who has that code. What is found is walked like arguments are, from the
next run on. Code of installed packages is left out: a library keeps its own state, and may have thousands of objects
with a method that ran.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sysconfig
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from capture.key.code_names import MISSING, globals_in
from capture.key.name_uses import name_uses
from capture.key.packages import name_of
from capture.key.pytree import PLAIN_TYPES
from capture.state.code_run import CodeRun
from capture.state.namespaces import Namespace, holds_state, is_of_users, scope_of
from capture.state.snapshot import (
    Snapshot,
    global_sources,
    may_change,
    modules_set,
    place_key,
    set_in_libraries,
    sets_in,
)
from capture.state.source import Source
from capture.torch_private.dynamo import installed_by_compiler

_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod)


class Unreached:
    """Functions that one captured function was seen to run, and that nothing it names leads to."""

    def __init__(self) -> None:
        self._looked_for: set[types.CodeType] = set()
        self._found: list[tuple[Callable[[], Any], str]] = []
        self._may_be: dict[types.CodeType, list[weakref.ref[Any]]] = {}
        """Functions with this code, and objects with such a method, where there are several: frames tell which. Where
        there are none, as the collector knows of nothing that it was told to leave alone, what frames see counts."""
        self._entered: list[tuple[Any, str]] = []
        """What frames told of in the last run, and a name for each."""
        self._globals: dict[tuple[int, Any], Source] = {}
        """Globals that methods name."""
        self._scopes: dict[int, Source] = {}
        """Modules in which methods set names."""

    def __bool__(self) -> bool:
        return bool(self._found or self._may_be or self._globals or self._scopes)

    def starts(self) -> list[tuple[Any, str]]:
        """What is still there, with a path for each."""
        return [(root.get(), root.path) for root in self.roots()]

    def roots(self) -> list[Source]:
        """The roots of a walk over these functions' state. Arguments are not among them: each call has new ones."""
        there = [(get, name) for get, name in self._found if get() is not None]
        found = [Source("call", get, None, f"{name}#{at}") for at, (get, name) in enumerate(there)]
        globals_named = [source for source in self._globals.values() if source.get() is not MISSING]
        return [*found, *globals_named, *self._scopes.values()]

    def watch(self) -> tuple[Collection[types.CodeType], Callable[[types.FrameType], None]]:
        """Code whose frames are looked at in the next run, and what looks at them."""
        self._entered.clear()
        return self._may_be.keys(), self._enter

    def _enter(self, frame: types.FrameType) -> None:
        """A frame of such code begins."""
        code, values = frame.f_code, frame.f_locals
        receiver, references = values.get(code.co_varnames[0]) if code.co_argcount else None, self._may_be.get(code, [])
        for value in [reference() for reference in references]:
            is_function = type(value) is types.FunctionType
            if value is not None and (value is receiver or (is_function and _has_cells(value, code, values))):
                self._entered.append((value, _name_of(value)))
        if not references:
            seen = {f"{code.co_qualname}:{name}": values.get(name) for name in code.co_freevars}
            if any(method.__code__ is code for method in _methods_of(type(receiver))):
                seen[f"{code.co_qualname}:{code.co_varnames[0]}"] = receiver
            self._entered += [(value, name) for name, value in seen.items() if type(value) not in PLAIN_TYPES]

    def search(self, state: Snapshot, ran: CodeRun, given: Iterable[type], *, runs_operators: bool) -> bool:
        """Look for functions that ran and that ``state`` did not come to. True: there were some. ``given``: classes of
        the arguments. ``runs_operators``: replays run the Python code of operators, so what that leaves behind is left
        as in the body."""
        codes = {code for code, scopes in ran.codes.items() if any(scope_of(scope.get("__name__")) for scope in scopes)}
        codes -= ran.below if runs_operators else set()
        codes = {code for code in codes if not code.co_filename.startswith(_INSTALLED)}
        has_more = self._note_globals(state, {code: ran.codes[code] for code in codes})
        codes -= self._looked_for | _made_by(ran)
        holders, self._entered = self._entered, []
        is_open = False
        if codes:
            self._looked_for |= codes
            entered = [value for _, value in state.entered if type(value) is types.FunctionType]
            codes -= _with_inner(function.__code__ for function in (*entered, *state.forwards))
        if codes:  # not of a small body, whose first call would wait longest for what follows
            methods = [method for method in _methods_in(state.namespaces.values()) if method.__code__ in codes]
            codes -= _with_inner(method.__code__ for method in methods)
            kinds = [*given, *_named_classes(ran)]  # their objects are made, or reached
            codes -= _with_inner(
                method.__code__ for kind in kinds for method in _methods_of(kind) if not _keeps_state(method)
            )
            codes = {code for code in codes if _may_keep_state(code, ran.codes[code])}
            alone, is_open = self._held_by_others(codes) if codes else ([], False)
            holders += [(function, _name_of(function)) for function in (*filter(_keeps_state, methods), *alone)]
        reached = {id(value) for value, _ in self.starts()}
        new = {id(value): (value, name) for value, name in holders if id(value) not in reached}
        self._found += [(_weakly(value), name) for value, name in new.values()]
        return bool(new) or is_open or has_more

    def _note_globals(self, state: Snapshot, ran: Mapping[types.CodeType, Iterable[dict[str, Any]]]) -> bool:
        """Note objects in globals that code of a class names and that ``state`` did not come to: of classes it has what
        they hold, and not what their methods name. Whether there are such."""
        reached = {id(value) for _, value in state.entered} | {id(tensor) for _, tensor, _ in state.flags}
        new = dict[tuple[int, Any], Source]()
        for code, scopes in ran.items():
            for scope in scopes:
                for source in global_sources(code, scope, None):
                    key, value = place_key(source), source.get()
                    if key in self._globals or id(value) in reached or not (may_change(value) or sets_in(code, value)):
                        continue
                    if source.kind != "global" or not installed_by_compiler(scope, source.name):
                        path = f"{scope.get('__name__')}.{source.path}"
                        new[key] = Source(source.kind, source.holder, source.name, path)
        self._globals |= new
        return bool(new) | self._note_libraries(state, ran) | self._note_scopes(state, ran)

    def _note_libraries(self, state: Snapshot, ran: Mapping[types.CodeType, Iterable[dict[str, Any]]]) -> bool:
        """Note names that code of a class sets in modules and classes of libraries."""
        found = {
            place_key(source): source
            for code, scopes in ran.items() if name_uses(code).set
            for scope in scopes for source in set_in_libraries(code, scope, None)
        }  # fmt: skip
        if found:
            known = {place_key(source) for source, _ in state.sources.values()}
            found = {key: source for key, source in found.items() if key not in known and key not in self._globals}
        self._globals |= found
        return bool(found)

    def _note_scopes(self, state: Snapshot, ran: Mapping[types.CodeType, Iterable[dict[str, Any]]]) -> bool:
        """Note modules in which code of a class sets names, and whose names ``state`` does not have."""
        new = {
            id(module): Source("scope", module, None, name_of(module))
            for code, scopes in ran.items() for scope in scopes for module in modules_set(code, scope)
            if id(module.__dict__) not in state.namespaces and id(module) not in self._scopes
        }  # fmt: skip
        self._scopes |= new
        return bool(new)

    def _held_by_others(self, codes: set[types.CodeType]) -> tuple[list[Any], bool]:
        """Functions with this code, their partials, and objects that have them as methods: those that are alone, and
        whether there are such of which frames have to tell."""
        by_id = {id(code) for code in codes}
        functions = [
            referrer for referrer in gc.get_referrers(*codes)
            if type(referrer) is types.FunctionType and id(referrer.__code__) in by_id
        ]  # fmt: skip
        holders = gc.get_referrers(*functions) if functions else []  # code of ``eval`` has none
        wrappers = [holder for holder in holders if issubclass(type(holder), _WRAPPERS)]
        holders += gc.get_referrers(*wrappers) if wrappers else []
        tables = {id(holder) for holder in holders if type(holder) is dict}
        methods = {code: list[Any]() for code in codes}
        for kind in _all_classes():
            if not tables.isdisjoint(map(id, gc.get_referents(kind))):
                own = [
                    function
                    for value in vars(kind).values()
                    for function in _functions_in(value)
                    if id(function.__code__) in by_id
                ]
                for objects in (_objects_of(kind),) if own else ():
                    for method in own:
                        methods[method.__code__] += objects
        alone, is_open = list[Any](filter(_is_partial, holders)), False
        for code in codes:  # a partial has arguments of such a function, which it may read as one reads its cells
            those = [function for function in functions if function.__code__ is code]
            for candidates in (those, methods[code]):
                if len(candidates) == 1:
                    alone += candidates
                elif candidates or not those:
                    self._may_be.setdefault(code, []).extend(map(weakref.ref, candidates))
                    is_open = True
        return alone, is_open


def _is_partial(value: Any) -> bool:
    return type(value) is functools.partial


def _may_keep_state(code: types.CodeType, scopes: Iterable[dict[str, Any]]) -> bool:
    """Whether a function with this code may keep state: in cells, a receiver, or globals. Code of ``eval`` and of class
    bodies belongs to no function."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return False
    named = [scope.get(name) for scope in scopes for name in globals_in(code)]
    owner = code.co_qualname.rpartition(".")[0]
    is_method = bool(owner) and not owner.endswith("<locals>") and code.co_argcount > 0
    return (
        is_method
        or bool(code.co_freevars)
        or any(type(value) not in PLAIN_TYPES and holds_state(value) for value in named)
    )


def _has_cells(function: types.FunctionType, code: types.CodeType, values: Mapping[str, Any]) -> bool:
    """Whether its cells hold what the frame sees."""
    try:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return True
    return all(values.get(name, one) is one for name, one in zip(code.co_freevars, held, strict=False))


def _methods_in(namespaces: Iterable[Namespace]) -> Iterator[types.FunctionType]:
    for space in namespaces:
        if issubclass(type(space.holder), type):
            for value in space.values:
                yield from _functions_in(value)


def _named_classes(ran: CodeRun) -> list[type]:
    """Users' classes that code names in its globals."""
    found: dict[int, Any] = {
        id(value): value for code, scopes in ran.codes.items() for name in globals_in(code) for scope in scopes
        if issubclass(type(value := scope.get(name)), type) and is_of_users(value.__module__)
    }  # fmt: skip
    return list(found.values())


def _made_by(ran: CodeRun) -> set[types.CodeType]:
    """Code of functions that the run itself made, and of methods of classes of which it made objects: those are others
    in each run. What an earlier run made is looked for when the run that made it is over."""
    made = {constant for code in ran.codes for constant in code.co_consts if type(constant) is types.CodeType}
    owners = {_owner_of(code) for code in ran.codes if code.co_name in _MAKING}
    return made | {code for code in ran.codes if not code.co_freevars and _owner_of(code) in owners}


def _owner_of(code: types.CodeType) -> tuple[str, str]:
    return code.co_filename, code.co_qualname.rpartition(".")[0]


def _methods_of(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__[:-1]:
        for value in vars(base).values():
            yield from _functions_in(value)


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    kind = type(value)
    parts: tuple[Any, ...] = (value,)
    if kind is property:
        parts = (value.fget, value.fset, value.fdel)
    elif kind in (functools.cached_property, functools.partialmethod):
        parts = (value.func,)
    elif kind in (staticmethod, classmethod):
        parts = (value.__func__,)
    for function in parts:
        while type(function) is types.FunctionType:  # and what a decorator has put it around
            yield function
            function = function.__dict__.get("__wrapped__")


def _keeps_state(method: types.FunctionType) -> bool:
    """Whether it keeps state in cells (apart from the class that ``super()`` needs) or in defaults."""
    return bool({*method.__code__.co_freevars} - {"__class__"} or method.__defaults__ or method.__kwdefaults__)


def _with_inner(codes: Iterable[types.CodeType]) -> set[types.CodeType]:
    """These code objects, and all code that is nested in them."""
    found = list(codes)
    for code in found:
        found += [constant for constant in code.co_consts if type(constant) is types.CodeType]
    return set(found)


def with_subclasses(kind: type) -> list[type]:
    """The class and all below it.

    Not ``gc.get_objects``, which also gives tuples that another thread is only making: one that somebody else refers to
    cannot grow, so that ``tuple(generator)`` would raise ``SystemError`` there.
    """
    found, waiting = {kind: None}, [kind]
    while waiting:
        direct: list[type] = type.__subclasses__(waiting.pop())
        below = [one for one in direct if one not in found]
        found |= dict.fromkeys(below)
        waiting += below
    return list(found)


def _all_classes() -> list[type]:
    return [kind for kind in with_subclasses(object) if is_of_users(kind.__module__)]


def _objects_of(kind: type) -> list[Any]:
    """The objects of the class and of its subclasses that the collector knows."""
    return [referrer for referrer in objects_of(kind) if _has_reference(referrer)]


def objects_of(kind: type) -> list[Any]:
    """As ``_objects_of``, of a class that a program defines: its objects refer to it."""
    below = with_subclasses(kind)
    kinds = {id(one) for one in below}
    return [referrer for referrer in gc.get_referrers(*below) if id(type(referrer)) in kinds]


def _has_reference(value: Any) -> bool:
    return bool(type(value).__weakrefoffset__)


def _name_of(value: Any) -> str:
    kind = value if issubclass(type(value), types.FunctionType) else type(value)
    return str(kind.__qualname__)
