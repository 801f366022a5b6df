"""A number that the host reads and the body only returns, such as a loss for the log.

Nothing follows from such a value, so replays need not compare it: each reads it anew, and puts it where the recorded
run has it in its result. The code proves that: ``x.item()``, ``float(x)``, ``int(x)`` or ``bool(x)`` is called, and
from there on, through every way that the code can take to its ``return``, the value is only moved between the stack,
local names, and new tuples, lists and dicts. So it is in the functions that called this one, up to the body, where each
is known to call the next one, not to have it called by code in C. Calls and operations on other values may come in
between, such as the next metric. What takes the value itself, a name that others see, or a call that may look at local
names ends the search, and the value is compared.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import types
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import field, frozen

from capture.torch_private.capabilities import FUNCTION_MODES

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_BETWEEN = (
    _HERE,
    *[_TORCH + name for name in ("_compile.py", "_dynamo", "_ops.py", "utils/_python_dispatch.py")],
    *[_TORCH + name.removeprefix("torch.").replace(".", os.sep) + ".py" for name in FUNCTION_MODES],
)
"""What runs between a body and an operator: a watch, and modes such as a default device."""
_BODY_RUNS_IN = (_HERE + "state/call.py", _HERE + "key/signature.py")
RETURNED = "returned as "
"""``Facts.reads`` has such a value with this prefix."""
_KINDS: dict[str, Any] = {"float": float, "int": int, "bool": bool}
_AND = "; "
_NO_KEY = frozenset(".;")
_MOST_FRAMES = 12
_MOST_STATES = 2_000


@frozen
class _Read:
    """The value that was read."""


@frozen
class _Constant:
    value: Any = field(eq=repr)


@frozen
class _Name:
    """What the code names."""

    kind: str
    name: str
    attributes: tuple[str, ...] = ()


@frozen
class _Made:
    """A container that the code made of the value and others."""

    members: tuple[tuple[Any, Any], ...]


class _Refused(Exception):
    """The value may be used."""


Value = _Read | _Constant | _Name | _Made | None
"""None: another value, of which nothing is known."""
_LOADS = (
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "LOAD_FAST_CHECK",
)
_STORES = ("STORE_FAST", "STORE_FAST_STORE_FAST")
_NAMED = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "local"}
_TAKES = {
    "LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_DEREF": 0, "LOAD_SMALL_INT": 0, "LOAD_CONST": 0, "PUSH_NULL": 0,
    "KW_NAMES": 0, "LOAD_METHOD": 1, "LOAD_ATTR": 1, "POP_TOP": 1, "UNARY_NEGATIVE": 1, "UNARY_NOT": 1,
    "UNARY_INVERT": 1, "BINARY_OP": 2, "BINARY_SUBSCR": 2, "COMPARE_OP": 2, "CONTAINS_OP": 2, "IS_OP": 2,
    "STORE_ATTR": 2, "STORE_SUBSCR": 3, "STORE_GLOBAL": 1, "STORE_DEREF": 1, "TO_BOOL": 1,
    "FORMAT_SIMPLE": 1, "GET_ITER": 1, "RESUME": 0, "DELETE_FAST": 0,
}  # fmt: skip
"""How many values other instructions take from the stack."""
_TAKES_MORE = {"CALL": 2, "CALL_KW": 3}
"""Beside as many as their argument says. They give one."""
_GIVE_ONE = ("BUILD_", "FORMAT_VALUE", "CALL_FUNCTION_EX", "CALL_INTRINSIC_")
_ENDS_OF_STATEMENTS = ("STORE_", "POP_TOP", "RETURN_", "RESUME", "DELETE_")
_ENDS = ("RAISE_VARARGS", "RERAISE", "RETURN_CONST")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_LOOKS_AROUND = frozenset(["locals", "vars", "dir", "eval", "exec", "breakpoint", "sys", "inspect"])
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def place_of_read(value: Any) -> str | None:
    """Where the result has the ``value`` that an operator reads for ``item()`` now: ``output.1``, or several such
    places; None if that is not known, or not all that comes of it."""
    frames = _frames()
    if not frames:
        return None
    kind = _kind_of_read(frames[0], value)
    if kind is None:
        return None
    left: Value = _Read()
    for inner, frame in zip([None, *frames], frames, strict=False):
        at = _step_at(frame.f_code, frame.f_lasti)
        if inner is not None and not _calls(frame, at, inner.f_code):
            return None
        left = _left_by(frame.f_code, at, left)
        if not _holds_read(left):
            return None
    return kind + _AND.join(_places(left, "output"))


def _frames() -> list[types.FrameType]:
    """The one that reads, and those that called it, up to the body; empty if the body is none of them."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    found: list[types.FrameType] = []
    while frame is not None and len(found) < _MOST_FRAMES and not frame.f_code.co_filename.startswith(_HERE):
        found.append(frame)
        frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(_BODY_RUNS_IN):
            return found
    return []


def _kind_of_read(frame: types.FrameType, value: Any) -> str | None:
    """How the code makes the value of what was read: nothing for ``item()``, ``"float of "`` for ``float(x)``."""
    steps, at = _steps(frame.f_code), _step_at(frame.f_code, frame.f_lasti)
    call = steps[at]
    if call.opname != "CALL" or not at:
        return None
    asked = steps[at - 1]
    if call.arg == 0:
        return "" if asked.argval == "item" and asked.opname in ("LOAD_METHOD", "LOAD_ATTR") else None
    callees = [_resolved(frame, one) for one in _callees(frame.f_code, at)] if call.arg == 1 else []
    for name, kind in _KINDS.items():
        if any(one is kind for one in callees):
            return f"{name} of " if name != "int" or isinstance(value, int) else None  # that of a fraction may raise
    return None


@functools.lru_cache(maxsize=256)
def _steps(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "NOP"))


def _step_at(code: types.CodeType, offset: int) -> int:
    """The number of the instruction that is under way. While it calls another function, the interpreter may stand on
    what it keeps behind the instruction."""
    return max(bisect_right(_steps(code), offset, key=_offset) - 1, 0)


def _offset(step: dis.Instruction) -> int:
    return step.offset


# ------------------------------------------------------------------------------------------------ who calls whom


def _calls(frame: types.FrameType, at: int, code: types.CodeType) -> bool:
    """This frame's present instruction itself calls the function with this code: code in C does not stand between."""
    return any(_code_of(_resolved(frame, one)) is code for one in _callees(frame.f_code, at))


@functools.lru_cache(maxsize=256)
def _callees(code: types.CodeType, at: int) -> tuple[Value, ...]:
    """The two places of a call in one of which is what it calls."""
    step = _steps(code)[at]
    takes = _taken_by(step)
    if not step.opname.startswith("CALL") or takes is None:
        return ()
    return tuple(_stack(_steps(code)[:at])[-takes:][:2])


def _resolved(frame: types.FrameType, name: Value) -> Any:
    """What this frame names, without running code of users; None if that is not known."""
    if not isinstance(name, _Name):
        return None
    if name.kind == "local":
        value = frame.f_locals.get(name.name)
    else:
        value = frame.f_globals.get(name.name, frame.f_builtins.get(name.name))
    for attribute in name.attributes:
        submodules = value._modules if isinstance(value, torch.nn.Module) else {}
        value = submodules.get(attribute, inspect.getattr_static(value, attribute, None))
    return value


def _code_of(value: Any) -> types.CodeType | None:
    """That of the Python function that a call of the value runs."""
    if isinstance(value, (types.MethodType, staticmethod, classmethod)):
        value = value.__func__
    if not isinstance(value, types.FunctionType) and not isinstance(value, type):
        value = inspect.getattr_static(type(value), "__call__", None)
    return value.__code__ if isinstance(value, types.FunctionType) else None


# ------------------------------------------------------------------------------------------------ what comes of it


@functools.lru_cache(maxsize=256)
def _left_by(code: types.CodeType, at: int, value: Value) -> Value:
    """What the code returns, as far as the ``value`` that this call gives is in it; None if more comes of it."""
    if code.co_flags & _SUSPENDS:
        return None
    steps = _steps(code)
    takes = _taken_by(steps[at])
    if takes is None:
        return None
    below = _stack(steps[:at])[: -takes or None]
    try:
        returned = _Ways(steps).returned(at + 1, (*below, value))
    except _Refused:
        return None
    return returned[0] if len(set(returned)) == 1 else None


def _stack(steps: Sequence[dis.Instruction]) -> list[Value]:
    """What these instructions leave on the stack, as far as it belongs to the last statement."""
    stack: list[Value] = []
    for step in steps:
        if step.opname.startswith(_ENDS_OF_STATEMENTS) or step.opcode in _JUMPS:
            stack = []
        elif step.opname in _LOADS:
            stack += [_Name("local", name) for name in _names(step)]
        else:
            takes = _taken_by(step)
            takes = max(-dis.stack_effect(step.opcode, step.arg), 0) if takes is None else takes
            taken = [stack.pop() if stack else None for _ in range(takes)][::-1]
            stack += _given(step, taken)
    return stack


def _names(step: dis.Instruction) -> tuple[str, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _taken_by(step: dis.Instruction) -> int | None:
    """How many values the instruction takes from the stack; None if that is not known."""
    if step.opname in _TAKES_MORE:
        return _TAKES_MORE[step.opname] + (step.arg or 0)
    if step.opname.startswith(_GIVE_ONE):
        return 1 - dis.stack_effect(step.opcode, step.arg)
    return _TAKES.get(step.opname)


def _given(step: dis.Instruction, taken: Sequence[Value]) -> list[Value]:
    """What the instruction puts on the stack for these."""
    name, first = step.opname, taken[0] if taken else None
    if name == "LOAD_CONST":
        return [_Constant(step.argval)]
    if name in _TAKES_MORE:
        return [None]
    effect = dis.stack_effect(step.opcode, step.arg)
    given: list[Value] = [None] * max(effect + len(taken), 0)
    if name in _NAMED and step.argval is not None:
        found: Value = _Name(_NAMED[name], step.argval)
    elif name in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(first, _Name):
        found = _Name(first.kind, first.name, (*first.attributes, step.argval))
    else:
        return given
    return [*given[:-1], found] if name != "LOAD_METHOD" and len(given) < 2 else [found] * len(given)


class _Ways:
    """Every way that code can take to its end."""

    def __init__(self, steps: Sequence[dis.Instruction]) -> None:
        self._steps = steps

    def returned(self, number: int, stack: tuple[Value, ...]) -> list[Value]:
        """What the code returns at the ends of all ways from here."""
        begun, seen, found = [(number, stack, frozenset[tuple[str, Value]]())], set(), list[Value]()
        while begun:
            number, stack, names = state = begun.pop()
            if state in seen:
                continue
            seen.add(state)
            step = self._steps[number]
            if len(seen) > _MOST_STATES:
                raise _Refused
            if step.opname == "RETURN_VALUE":
                found.append(stack[-1] if stack else None)
            elif step.opname in _ENDS:
                found += [None] if step.opname == "RETURN_CONST" else []
            elif step.opcode in _JUMPS:
                begun += [(at, after, names) for at, after in self._jumps(number, stack)]
            else:
                begun.append((number + 1, *_done(step, list(stack), dict(names))))
        return found

    def _jumps(self, number: int, stack: tuple[Value, ...]) -> Iterator[tuple[int, tuple[Value, ...]]]:
        step = self._steps[number]
        if stack and _holds_read(stack[-1]) and not step.opname.startswith("JUMP_FORWARD"):
            raise _Refused
        goes_on = not step.opname.startswith("JUMP_") or "_IF_" in step.opname
        for jumps in (False, True) if goes_on else (True,):
            effect = dis.stack_effect(step.opcode, step.arg, jump=jumps)
            after = stack[: len(stack) + effect] if effect < 0 else (*stack, *[None] * effect)
            yield (bisect_left(self._steps, step.argval, key=_offset) if jumps else number + 1), after


def _done(
    step: dis.Instruction, stack: list[Value], names: dict[str, Value]
) -> tuple[tuple[Value, ...], frozenset[tuple[str, Value]]]:
    """Stack and local names after an instruction. Of both only what holds the read is kept apart."""

    def taken(count: int) -> list[Value]:
        return [stack.pop() if stack else None for _ in range(count)][::-1]  # below lies what came before the read

    name, count = step.opname, step.arg or 0
    if name in _LOADS:
        stack += [names.get(one) for one in _names(step)]
    elif name in _STORES:
        for one in _names(step):
            names[one] = taken(1)[0]
    elif name == "STORE_FAST_LOAD_FAST":
        first, second = _names(step)
        names[first] = taken(1)[0]
        stack.append(names.get(second))
    elif name == "SWAP":
        stack[:0] = [None] * (count - len(stack))
        stack[-count], stack[-1] = stack[-1], stack[-count]
    elif name == "COPY":
        stack.append(stack[-count] if count <= len(stack) else None)
    elif name == "LOAD_CONST":
        stack.append(_Constant(step.argval))
    elif name in ("BUILD_TUPLE", "BUILD_LIST"):
        stack.append(_made(list(enumerate(taken(count)))))
    elif name == "BUILD_CONST_KEY_MAP":
        keys = taken(1)[0]
        assert isinstance(keys, _Constant)
        stack.append(_dict([*map(_Constant, keys.value)], taken(count)))
    elif name == "BUILD_MAP":
        values = taken(2 * count)
        stack.append(_dict(values[::2], values[1::2]))
    elif name == "UNPACK_SEQUENCE":
        stack += _members(taken(1)[0], range(count))[::-1]
    elif name == "BINARY_SUBSCR":
        container, key = taken(2)
        stack += _members(container, [key.value if isinstance(key, _Constant) else _Read()])
    else:
        _do_more(step, stack, taken)
    held = frozenset((one, value) for one, value in names.items() if _holds_read(value))
    return tuple(one if _holds_read(one) or isinstance(one, _Constant) else None for one in stack), held


def _do_more(step: dis.Instruction, stack: list[Value], taken: Any) -> None:
    """Any other instruction. It must not take the read."""
    takes = _taken_by(step)
    looks = takes == 0 and not _LOOKS_AROUND.isdisjoint(map(str, _names(step)))
    if looks or any(map(_holds_read, stack if takes is None else taken(takes))):
        raise _Refused
    effect = dis.stack_effect(step.opcode, step.arg)
    if takes is None:
        taken(max(-effect, 0))
        stack += [None] * max(effect, 0)
    else:
        stack += [None] * (1 if step.opname in _TAKES_MORE else takes + effect)


def _made(members: Sequence[tuple[Any, Value]]) -> Value:
    return _Made(tuple(members)) if any(_holds_read(one) for _, one in members) else None


def _dict(keys: Sequence[Value], values: Sequence[Value]) -> Value:
    """Keys are plain names: their texts tell them apart."""
    if not any(map(_holds_read, (*keys, *values))):
        return None
    if not all(isinstance(one, _Constant) and type(one.value) is str and _NO_KEY.isdisjoint(one.value) for one in keys):
        raise _Refused
    return _made([*{one.value: value for one, value in zip(keys, values, strict=True)}.items()])  # type: ignore[union-attr]


def _members(container: Value, keys: Sequence[Any]) -> list[Value]:
    if not _holds_read(container):
        return [None] * len(keys)
    members = dict(container.members) if isinstance(container, _Made) else {}
    if not all(type(key) in (int, str) and key in members for key in keys):
        raise _Refused
    return [members[key] for key in keys]


def _holds_read(value: Value) -> bool:
    return isinstance(value, (_Read, _Made))


def _places(made: Value, path: str) -> Iterator[str]:
    if isinstance(made, _Read):
        yield path
    for name, member in made.members if isinstance(made, _Made) else ():
        yield from _places(member, f"{path}.{name}")


# ------------------------------------------------------------------------------------------------ in a replay


def returned_at(reads: Sequence[str]) -> dict[int, list[str]]:
    """The places of values that the body only returns, by the number of their read."""
    return {number: _split(told)[1].split(_AND) for number, told in enumerate(reads) if told.startswith(RETURNED)}


def given(told: str, value: Any) -> Any:
    """What the body returns of a value that was read, and is told so."""
    kind, _ = _split(told)
    return _KINDS[kind](value) if kind else value


def _split(told: str) -> tuple[str, str]:
    places = told.removeprefix(RETURNED)
    kind, _, rest = places.partition(" of ")
    return (kind, rest) if kind in _KINDS else ("", places)


def put(result: Any, place: str, value: Any) -> Any:
    """A result as the body returns it, with this value in its place."""
    name, _, rest = place.partition(".")[2].partition(".")
    if not name:
        return value
    at: Any = name if isinstance(result, dict) else int(name)
    member = put(result[at], f".{rest}" if rest else "", value)
    if isinstance(result, dict):
        return {**result, name: member}
    return type(result)([*result[:at], member, *result[at + 1 :]])
