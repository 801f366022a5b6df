"""Every read that the bytecode of a body makes of objects from outside, and whether some guard tells of it.

The body runs once under ``sys.settrace`` with events for each instruction. What an instruction takes is read from the
frame's stack, which only this file knows the place of: CPython 3.11 to 3.13 keep it alike.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import dis
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from attrs import define, field

from capture import config
from capture.api.decorator import captured_states
from capture.guards.guard import Guard
from capture.guards.read_guards import CLOSED
from capture.key.packages import is_library, package_of
from capture.runtime.captured import Captured
from capture.state.source import Source
from tests.support.garbage import all_objects

_FRAME, _STACK_TOP, _LOCALS = 24, 64, 72  # in a frame object; in what it points to
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
_CONTAINERS = (list, dict, set, collections.deque)
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_WHOLE = {  # how far below the top of the stack lies what is looked into
    "BINARY_SUBSCR": (1,), "GET_ITER": (0,), "CONTAINS_OP": (0,), "COMPARE_OP": (0, 1), "UNPACK_SEQUENCE": (0,),
    "LIST_EXTEND": (0,), "SET_UPDATE": (0,), "DICT_UPDATE": (0,), "DICT_MERGE": (0,), "UNPACK_EX": (0,),
    "GET_LEN": (0,), "MATCH_KEYS": (1,), "CALL_FUNCTION_EX": (0, 1),
}  # fmt: skip


@define(eq=False)
class Covered:
    """What some guards tell of."""

    names: dict[int, set[str]] = field(factory=dict)
    """By ``id`` of a dict or a class."""
    whole: set[int] = field(factory=set)
    """``id`` of containers and cells."""
    slots: set[tuple[int, str]] = field(factory=set)
    written: set[int] = field(factory=set)
    """``id`` of what the body itself changes: effects are another matter."""

    def add(self, guard: Guard) -> None:
        """What this one tells of."""
        holder, expected = guard.source.holder, guard.expected
        match guard.kind:
            case "members":
                absent, there = expected
                self._name(holder, [*absent, *(name for name, _ in there)])
            case "names":
                self._name(holder, expected[0])
            case "table" | "sequence":
                self.whole.add(id(holder))
                if isinstance(holder, dict):
                    self._name(holder, [name for name in holder if isinstance(name, str)])
            case "length":  # beside all of its names
                self.whole.add(id(holder))
            case "empty":
                self.whole.update(map(id, holder))
            case _:
                self.place(guard.source)

    def place(self, source: Source) -> None:
        """One place is looked at."""
        if source.kind == "closure":
            self.whole.add(id(source.holder))
        elif source.kind == "slot":
            self.slots.add((id(source.holder), source.name.__name__))
        elif source.kind == "weak" or (source.kind == "item" and isinstance(source.holder, dict)):
            self._name(source.holder, [source.name])
        elif source.kind == "call":
            self._called(source.holder)

    def _called(self, read: Any) -> None:
        """Functions that compare something as a whole."""
        if isinstance(read, functools.partial):
            self.whole.update(map(id, read.args))
            if len(read.args) == 2 and isinstance(read.args[0], types.MemberDescriptorType):
                self.slots.add((id(read.args[1]), read.args[0].__name__))

    def _name(self, holder: Any, names: Iterable[str]) -> None:
        found = holder() if isinstance(holder, weakref.ref) else holder
        own = found if isinstance(found, (dict, type)) else getattr(found, "__dict__", None)
        self.names.setdefault(id(own), set()).update(names)


def covered_by(states: Iterable[Captured]) -> Covered:
    """All that recordings of these functions look at."""
    found = Covered()
    for state in states:
        for entry in state.entries():
            for node in entry.nodes:
                for guard in node.guard.guards():
                    found.add(guard)
    return found


@define(eq=False)
class Tracer:
    """Notes reads that nothing tells of."""

    covered: Covered
    outside: dict[int, Any]
    """By ``id`` all objects that were there before the body ran."""
    reads: int = 0
    unguarded: list[str] = field(factory=list)

    def frame(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """Follow the frame, if its code is a user's."""
        package = package_of(frame.f_globals.get("__name__"))
        frame.f_trace_opcodes = True
        return self.step if package != "capture" and not is_library(package) else None

    def step(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """One instruction is about to run."""
        if event == "opcode":
            one = _instructions(frame.f_code).get(frame.f_lasti)
            if one is not None:
                for what in self._missed(frame, one):
                    self.unguarded.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} {one.opname}: {what}")
        return self.step

    def _missed(self, frame: types.FrameType, one: dis.Instruction) -> Iterator[str]:
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield from self._global(frame, one.argval)
        elif one.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"):
            yield from self._cell(frame, one)
        elif one.opname in _ATTRIBUTES:
            yield from self._attribute(_stacked(frame, 0), one.argval)
        elif one.opname == "BINARY_SUBSCR" and isinstance(_stacked(frame, 0), str):
            yield from self._item(_stacked(frame, 1), _stacked(frame, 0))
        elif one.opname == "CONTAINS_OP" and isinstance(_stacked(frame, 1), str):
            yield from self._item(_stacked(frame, 0), _stacked(frame, 1))
        elif one.opname in _WHOLE:
            for depth in _WHOLE[one.opname]:
                yield from self._container(_stacked(frame, depth))
        elif one.opname == "CALL":
            yield from self._call(frame, one.arg or 0)

    def _global(self, frame: types.FrameType, name: str) -> Iterator[str]:
        if frame.f_locals is not frame.f_globals and name in frame.f_locals:
            return
        scope = frame.f_globals
        if id(scope) not in self.outside:  # made by the body
            return
        yield from self._name(scope, name, f"global {name}")
        if name not in scope:
            yield from self._name(vars(builtins), name, f"built-in {name}")

    def _name(self, own: Any, name: str, what: str) -> Iterator[str]:
        self.reads += 1
        if name not in self.covered.names.get(id(own), ()) and id(own) not in self.covered.whole | self.covered.written:
            yield what

    def _cell(self, frame: types.FrameType, one: dis.Instruction) -> Iterator[str]:
        function_cells = _cells_of(frame)
        cell = function_cells.get(one.argval)
        if cell is not None and id(cell) in self.outside:
            self.reads += 1
            if id(cell) not in self.covered.whole | self.covered.written:
                yield f"cell {one.argval}"

    def _attribute(self, found: Any, name: str) -> Iterator[str]:
        kind = type(found)
        if found is _NOTHING or isinstance(found, (torch.Tensor, torch.Size, torch.dtype, torch.device)):
            return
        if kind is super:
            yield from self._classes(found.__self_class__.__mro__, name)
            return
        if id(found) not in self.outside or package_of(kind.__module__) in CLOSED:
            return
        if isinstance(found, types.ModuleType):
            switch = is_library(package_of(found.__name__)) and name not in vars(found)  # part of the key
            if package_of(found.__name__) not in CLOSED and not switch:
                yield from self._name(vars(found), name, f"{found.__name__}.{name}")
            return
        if isinstance(found, type):
            yield from self._classes(found.__mro__, name)
        own = _dict_of(found)
        if own is not None and not isinstance(found, type):
            yield from self._name(own, name, f"{name} of a {kind.__qualname__}")
        yield from self._classes(kind.__mro__, name)
        for one in kind.__mro__:
            if isinstance(one.__dict__.get(name), types.MemberDescriptorType) and one.__flags__ & _HEAP:
                self.reads += 1
                if (id(found), name) not in self.covered.slots and id(found) not in self.covered.written:
                    yield f"slot {name} of a {kind.__qualname__}"

    def _classes(self, classes: Iterable[type], name: str) -> Iterator[str]:
        for one in classes:
            if one.__flags__ & (_HEAP | _IMMUTABLE) != _HEAP or package_of(one.__module__) in CLOSED:
                continue
            if id(one) in self.outside and not (name.startswith("__") and name.endswith("__")):
                yield from self._name(one, name, f"{name} of class {one.__qualname__}")
            if name in one.__dict__:
                return

    def _container(self, found: Any) -> Iterator[str]:
        if isinstance(found, _CONTAINERS) and id(found) in self.outside:
            self.reads += 1
            if id(found) not in self.covered.whole | self.covered.written:
                yield f"members of a {type(found).__qualname__} {list(found)[:3]}"

    def _item(self, found: Any, name: str) -> Iterator[str]:
        if name not in self.covered.names.get(id(found), ()):
            yield from self._container(found)

    def _call(self, frame: types.FrameType, count: int) -> Iterator[str]:
        """C code may look into what it is given."""
        stack = [_stacked(frame, depth) for depth in range(count + 2)]
        if any(isinstance(one, (types.BuiltinFunctionType, types.MethodDescriptorType)) for one in stack[count:]):
            for one in stack[:count]:
                yield from self._container(one)
            yield from self._container(getattr(stack[count], "__self__", None))


_NOTHING = object()


def _dict_of(found: Any) -> Any:
    try:
        return object.__getattribute__(found, "__dict__")
    except (AttributeError, TypeError):
        return None


def _stacked(frame: types.FrameType, depth: int) -> Any:
    """What lies so far below the top of the frame's stack."""
    inner = ctypes.c_void_p.from_address(id(frame) + _FRAME).value
    assert inner is not None
    top = ctypes.c_int.from_address(inner + _STACK_TOP).value
    at = top - 1 - depth
    if at < 0:
        return _NOTHING
    place = ctypes.c_void_p.from_address(inner + _LOCALS + 8 * at).value
    return _NOTHING if not place else ctypes.cast(place, ctypes.py_object).value


def _cells_of(frame: types.FrameType) -> dict[str, Any]:
    """The frame's free variables, as cells."""
    inner = ctypes.c_void_p.from_address(id(frame) + _FRAME).value
    assert inner is not None
    code = frame.f_code
    names = [*code.co_varnames, *[one for one in code.co_cellvars if one not in code.co_varnames], *code.co_freevars]
    found = {}
    for at, name in enumerate(names):
        if name in code.co_freevars:
            place = ctypes.c_void_p.from_address(inner + _LOCALS + 8 * at).value
            found[name] = ctypes.cast(place, ctypes.py_object).value if place else None
    return found


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> dict[int, dis.Instruction]:
    return {one.offset: one for one in dis.get_instructions(code)}


def _outside() -> dict[int, Any]:
    """All objects that there are, but for plain values: the collector does not know dicts of such."""
    with all_objects():
        gc.collect()
        kept = gc.get_objects()
        untracked = [one for one in gc.get_referents(*kept) if type(one) is dict]
        return {id(one): one for one in (*kept, *untracked)}


def trace(captured: Any, *arguments: Any, written: Iterable[Any] = ()) -> Tracer:
    """Call a captured function eagerly. ``written``: what its body changes."""
    covered = covered_by(captured_states(captured))
    covered.written.update(map(id, written))
    tracer, before = Tracer(covered, _outside()), sys.gettrace()
    with config.patch(enabled=False):
        sys.settrace(tracer.frame)
        try:
            captured(*arguments)
        finally:
            sys.settrace(before)
            tracer.outside = {}
    return tracer
