"""Every read that the bytecode of a body makes of objects from outside, and whether some guard tells of it.

The body runs once with an event for each instruction: by ``sys.settrace`` on Python 3.11, by ``sys.monitoring`` from
3.12 on. What an instruction takes is read from the stack of the frame, which only this file knows the place of. From
3.12 on a frame does not say how high its stack is while it runs; that follows from its code.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import dis
import functools
import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field

from capture import config
from capture.api.decorator import captured_states
from capture.guards.guard import Guard
from capture.guards.read_walk import CLOSED
from capture.key.packages import is_library, package_of
from capture.runtime.captured import Captured
from capture.state.source import Source
from tests.support.garbage import all_objects

_FRAME, _STACK_TOP = 24, 64  # in a frame object; in what it points to
_MONITORS = hasattr(sys, "monitoring")
_LOCALS = 72 if sys.version_info < (3, 14) else 80
_TAGS = 3 if sys.version_info >= (3, 14) else 0  # bits of a reference that are no part of the address
_ENDING = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD",
           "JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT"}  # fmt: skip
"""After these the next instruction is not the one that runs."""
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
_CONTAINERS = (list, dict, set, collections.deque)
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_WHOLE = {  # the depths below the top of the stack of the objects that are read
    "BINARY_SUBSCR": (1,), "GET_ITER": (0,), "CONTAINS_OP": (0,), "COMPARE_OP": (0, 1), "UNPACK_SEQUENCE": (0,),
    "LIST_EXTEND": (0,), "SET_UPDATE": (0,), "DICT_UPDATE": (0,), "DICT_MERGE": (0,), "UNPACK_EX": (0,),
    "GET_LEN": (0,), "MATCH_KEYS": (1,), "CALL_FUNCTION_EX": (0, 1),
}  # fmt: skip


@define(eq=False)
class Covered:
    """The names, containers and slots that guards of some recordings look at."""

    names: dict[int, set[str]] = field(factory=dict)
    """Names that are guarded, by ``id`` of the dict or class."""
    whole: set[int] = field(factory=set)
    """``id`` of containers and cells."""
    slots: set[tuple[int, str]] = field(factory=set)
    written: set[int] = field(factory=set)
    """``id`` of objects that the body itself changes, of which reads need no guard."""

    def add(self, guard: Guard) -> None:
        """Add what one guard covers."""
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
            case "length":  # with the length, guards on all names
                self.whole.add(id(holder))
            case "empty":
                self.whole.update(map(id, holder))
            case _:
                self.place(guard.source)

    def place(self, source: Source) -> None:
        """Add one place."""
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
    """All that guards of these functions' recordings cover."""
    covered = Covered()
    for state in states:
        for entry in state.entries():
            for node in entry.nodes:
                for guard in node.guard.guards():
                    covered.add(guard)
    return covered


@define(eq=False)
class Tracer:
    """Notes reads that no guard covers."""

    covered: Covered
    outside: dict[int, Any]
    """By ``id`` all objects that were there before the body ran."""
    reads: int = 0
    unguarded: list[str] = field(factory=list)

    def follows(self, frame: types.FrameType) -> bool:
        """Whether this frame's code is a user's. What a garbage collection runs, as a callback of hypothesis, is none
        of the body's."""
        if frame.f_code in [getattr(callback, "__code__", None) for callback in gc.callbacks]:
            return False
        package = package_of(frame.f_globals.get("__name__"))
        return package != "capture" and not is_library(package)

    def look(self, frame: types.FrameType, at: int) -> None:
        """Look at the instruction at this offset, before it runs."""
        one = _instructions(frame.f_code).get(at)
        if one is not None:
            for what in self._missed(frame, one):
                self.unguarded.append(f"{frame.f_code.co_qualname}:{frame.f_lineno} {one.opname}: {what}")

    def frame(self, frame: types.FrameType, event: str, _: Any) -> Any:
        """A trace function for ``sys.settrace``."""
        frame.f_trace_opcodes = True
        return self._step if self.follows(frame) else None

    def _step(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self.look(frame, frame.f_lasti)
        return self._step

    def _missed(self, frame: types.FrameType, instruction: dis.Instruction) -> Iterator[str]:
        stacked = functools.partial(_stacked, frame, _top(frame, instruction.offset))
        name = (
            "BINARY_SUBSCR" if instruction.opname == "BINARY_OP" and "[]" in instruction.argrepr else instruction.opname
        )
        yield from self._by_name(frame, instruction)
        if name in _ATTRIBUTES:
            yield from self._attribute(stacked(0), instruction.argval)
        elif name == "BINARY_SUBSCR" and isinstance(stacked(0), str):
            yield from self._item(stacked(1), stacked(0))
        elif name == "CONTAINS_OP" and isinstance(stacked(1), str):
            yield from self._item(stacked(0), stacked(1))
        elif name in _WHOLE:
            for depth in _WHOLE[name]:
                yield from self._container(stacked(depth))
        elif name == "CALL":
            yield from self._call(stacked, instruction.arg or 0)

    def _by_name(self, frame: types.FrameType, one: dis.Instruction) -> Iterator[str]:
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield from self._global(frame, one.argval)
        elif one.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE"):
            yield from self._cell(frame, one)

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

    def _attribute(self, holder: Any, name: str) -> Iterator[str]:
        kind = type(holder)
        if holder is _NOTHING or isinstance(holder, (torch.Tensor, torch.Size, torch.dtype, torch.device)):
            return
        if kind is super:
            yield from self._classes(holder.__self_class__.__mro__, name)
            return
        if id(holder) not in self.outside or package_of(kind.__module__) in CLOSED:
            return
        if isinstance(holder, types.ModuleType):
            switch = is_library(package_of(holder.__name__)) and name not in vars(holder)  # part of the key
            if package_of(holder.__name__) not in CLOSED and not switch:
                yield from self._name(vars(holder), name, f"{holder.__name__}.{name}")
            return
        if isinstance(holder, type):
            yield from self._classes(holder.__mro__, name)
        own = _dict_of(holder)
        if own is not None and not isinstance(holder, type):
            yield from self._name(own, name, f"{name} of a {kind.__qualname__}")
        yield from self._classes(kind.__mro__, name)
        for base in kind.__mro__:
            if isinstance(base.__dict__.get(name), types.MemberDescriptorType) and base.__flags__ & _HEAP:
                self.reads += 1
                if (id(holder), name) not in self.covered.slots and id(holder) not in self.covered.written:
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

    def _call(self, stacked: Callable[[int], Any], count: int) -> Iterator[str]:
        """Reads that a call makes: C code may look into its arguments."""
        stack = [stacked(depth) for depth in range(count + 2)]
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


def _held(place: int) -> Any:
    """What a reference in a frame refers to; the same value as of no reference where it is empty."""
    address = (ctypes.c_void_p.from_address(place).value or 0) & ~_TAGS
    return ctypes.cast(address, ctypes.py_object).value if address else _NOTHING


def _inner(frame: types.FrameType) -> int:
    inner = ctypes.c_void_p.from_address(id(frame) + _FRAME).value
    assert inner is not None
    return inner


def _stacked(frame: types.FrameType, top: int, depth: int) -> Any:
    """What lies so far below the top of the frame's stack."""
    at = top - 1 - depth
    return _NOTHING if at < 0 else _held(_inner(frame) + _LOCALS + 8 * at)


def _top(frame: types.FrameType, offset: int) -> int:
    """How many places, local variables' among them, are in use; less than any depth where that is not known."""
    if not _MONITORS:
        return ctypes.c_int.from_address(_inner(frame) + _STACK_TOP).value
    height = _heights(frame.f_code).get(offset)
    return -(10**6) if height is None else len(_variables(frame.f_code)) + height


def _variables(code: types.CodeType) -> list[str]:
    return [
        *code.co_varnames,
        *[name for name in code.co_cellvars if name not in code.co_varnames],
        *code.co_freevars,
    ]


def _cells_of(frame: types.FrameType) -> dict[str, Any]:
    """The frame's free variables, as cells."""
    begin, code = _inner(frame) + _LOCALS, frame.f_code
    places = {name: begin + 8 * at for at, name in enumerate(_variables(code)) if name in code.co_freevars}
    return {name: held for name, place in places.items() if (held := _held(place)) is not _NOTHING}


@functools.lru_cache(maxsize=4096)
def _heights(code: types.CodeType) -> dict[int, int]:
    """By offset of an instruction: how high the stack is before it. What is reached by exceptions alone is left out."""
    instructions = list(dis.get_instructions(code))
    following = {step.offset: following_step.offset for step, following_step in itertools.pairwise(instructions)}
    by_offset = {instruction.offset: instruction for instruction in instructions}
    heights: dict[int, int] = {}
    todo = [(0, 0)]
    while todo:
        at, height = todo.pop()
        if at in heights or at not in by_offset:
            continue
        heights[at], step = height, by_offset[at]
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            todo.append((step.argval, height + dis.stack_effect(step.opcode, step.arg, jump=True)))
        if step.opname not in _ENDING and at in following:
            todo.append((following[at], height + dis.stack_effect(step.opcode, step.arg, jump=False)))
    return heights


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> dict[int, dis.Instruction]:
    return {instruction.offset: instruction for instruction in dis.get_instructions(code)}


def _outside() -> dict[int, Any]:
    """All objects by ``id``, except plain values. The collector does not list dicts of plain values: they are added."""
    with all_objects():
        gc.collect()
        kept = gc.get_objects()
        untracked = [referent for referent in gc.get_referents(*kept) if type(referent) is dict]
        return {id(one): one for one in (*kept, *untracked)}


def trace(captured: Any, *arguments: Any, written: Iterable[Any] = ()) -> Tracer:
    """Call a captured function eagerly. ``written``: what its body changes."""
    covered = covered_by(captured_states(captured))
    covered.written.update(map(id, written))
    tracer = Tracer(covered, _outside())
    with config.patch(enabled=False), _monitored(tracer) if _MONITORS else _settrace(tracer):
        try:
            captured(*arguments)
        finally:
            tracer.outside = {}
    return tracer


@contextmanager
def _settrace(tracer: Tracer) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(tracer.frame)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _monitored(tracer: Tracer) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    thread, event = threading.get_ident(), monitoring.events.INSTRUCTION

    def instruction(code: types.CodeType, offset: int) -> Any:
        frame = sys._getframe(1)
        if threading.get_ident() != thread or frame.f_code is not code:
            return None
        if not tracer.follows(frame):
            return monitoring.DISABLE
        tracer.look(frame, offset)
        return None

    monitoring.use_tool_id(monitoring.DEBUGGER_ID, "read tracer")
    try:
        monitoring.register_callback(monitoring.DEBUGGER_ID, event, instruction)
        monitoring.set_events(monitoring.DEBUGGER_ID, event)
        yield
    finally:
        monitoring.set_events(monitoring.DEBUGGER_ID, 0)
        monitoring.register_callback(monitoring.DEBUGGER_ID, event, None)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)
        monitoring.restart_events()  # events that were switched off come again
