"""A number that the host reads and the body only returns, such as a loss for the log.

Nothing follows from such a value, so replays need not compare it: each reads it anew, and puts it where the recorded
run has it in its result. The body's own code proves that: ``x.item()`` or ``float(x)`` is called in the frame of the
body itself, and from there to its ``return`` its value is only moved between the stack, local names and new tuples,
lists and dicts. Calls and operations on other values may come in between, such as the next metric. What takes the value
itself, a name that others see, a jump, or a call that may look at local names ends the search, and the value is
compared.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

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


@frozen(eq=False)
class _Made:
    """A container that the body makes."""

    members: dict[Any, Any]


@frozen(eq=False)
class _Constant:
    value: Any


_AS_FLOAT = "float of "
_READ, _REFUSED = object(), object()
_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
_STORES = ("STORE_FAST", "STORE_FAST_STORE_FAST")
_TAKES = {
    "LOAD_GLOBAL": 0, "LOAD_DEREF": 0, "LOAD_SMALL_INT": 0, "PUSH_NULL": 0, "KW_NAMES": 0, "LOAD_METHOD": 1,
    "LOAD_ATTR": 1, "POP_TOP": 1, "UNARY_NEGATIVE": 1, "UNARY_NOT": 1, "UNARY_INVERT": 1, "BINARY_OP": 2,
    "BINARY_SUBSCR": 2, "COMPARE_OP": 2, "IS_OP": 2,
}  # fmt: skip
"""How many values other instructions take from the stack."""
_TAKES_MORE = {"CALL": 2, "CALL_KW": 3, "BUILD_SLICE": 0}
"""Beside as many as their argument says."""
_ENDS_OF_STATEMENTS = ("STORE_", "POP_TOP", "RETURN_", "RESUME", "DELETE_")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_LOOKS_AROUND = frozenset(["locals", "vars", "dir", "eval", "exec", "breakpoint", "sys", "inspect"])


def place_of_read() -> str | None:
    """Where the result has the number that an operator reads for ``item()`` now: ``output.1``; None if that is not
    known, or not all that comes of it."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or frame.f_back is None or not frame.f_back.f_code.co_filename.startswith(_BODY_RUNS_IN):
        return None
    own = frame.f_globals.get("float", float) is float and frame.f_builtins.get("float") is float
    return _place(frame.f_code, frame.f_lasti, has_float=own)


@functools.lru_cache(maxsize=256)
def _place(code: types.CodeType, at: int, *, has_float: bool) -> str | None:
    """``has_float``: the name means Python's own ``float``."""
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "NOP")]
    number = next((n for n, one in enumerate(steps) if one.offset == at), 0)
    asked, call = steps[number - 1], steps[number]
    suspends = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    if not number or call.opname != "CALL" or code.co_flags & suspends:
        return None
    if call.arg == 0 and asked.argval == "item" and asked.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        below, kind = _below(steps[: number - 1]), ""
    elif call.arg == 1 and has_float and (callee := _callee(steps[:number], 1)) is not None:
        pushed = dis.stack_effect(steps[callee].opcode, steps[callee].arg)  # the function, and a NULL beside it
        below, kind = _below(steps[: callee + 1]), _AS_FLOAT
        below = below[: len(below) + 1 - pushed]
    else:
        return None
    places = _places(_returned(steps[number + 1 :], below), "output")
    return f"{kind}{places[0]}" if len(places) == 1 else None


def _callee(steps: Sequence[dis.Instruction], values: int) -> int | None:
    """Which instruction put ``float`` where it is below so many values, if it is that."""
    for number in range(len(steps) - 1, -1, -1):
        one = steps[number]
        if values == 0:
            return number if one.opname == "LOAD_GLOBAL" and one.argval == "float" else None
        if one.opname.startswith(_ENDS_OF_STATEMENTS) or one.opcode in _JUMPS:
            return None
        values -= -(one.arg or 0) - 1 if one.opname == "CALL" else dis.stack_effect(one.opcode, one.arg)
        if values < 0:
            return None
    return None


def _below(steps: Sequence[dis.Instruction]) -> list[Any]:
    """What lies below the tensor that these instructions end with: keys of a dict that is being made, and what else the
    statement has put there, which is not known."""
    stack: list[Any] = []
    for instruction in steps:
        if instruction.opname.startswith(_ENDS_OF_STATEMENTS) or instruction.opcode in _JUMPS:
            stack = []
        elif instruction.opname == "LOAD_CONST":
            stack.append(_Constant(instruction.argval))
        else:
            effect = dis.stack_effect(instruction.opcode, instruction.arg)
            takes = max(1 - effect, 0)
            stack = [*stack[: max(len(stack) - takes, 0)], *[None] * (effect + takes)]
    return stack[:-1]


def _returned(steps: Sequence[dis.Instruction], below: Sequence[Any]) -> Any:
    """What the body returns, as far as the read is in it. ``below``: what the stack has by then."""
    stack: list[Any] = [*below, _READ]
    names: dict[str, Any] = {}

    def taken(count: int) -> list[Any]:
        values = [stack.pop() if stack else None for _ in range(count)]  # below lies what came before the read
        return values[::-1]

    for instruction in steps:
        count = instruction.arg or 0
        if instruction.opname == "RETURN_VALUE":
            return taken(1)[0]
        named = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        takes = _TAKES.get(instruction.opname)
        gives = 1 if takes is None else takes + dis.stack_effect(instruction.opcode, instruction.arg)
        if takes is None and instruction.opname in _TAKES_MORE:
            takes = _TAKES_MORE[instruction.opname] + count
        if takes is not None:
            if any(_places(one, "") for one in taken(takes)) or (takes == 0 and not _LOOKS_AROUND.isdisjoint(named)):
                return None
            stack += [None] * gives
        elif instruction.opname == "SWAP":
            stack[:0] = [None] * (count - len(stack))
            stack[-count], stack[-1] = stack[-1], stack[-count]
        elif instruction.opname in _LOADS:
            stack += map(names.get, named)
        elif instruction.opname == "LOAD_CONST":
            stack.append(_Constant(instruction.argval))
        elif instruction.opname in _STORES:
            for name in named:
                names[name] = taken(1)[0]
        elif instruction.opname == "STORE_FAST_LOAD_FAST":
            names[named[0]] = taken(1)[0]
            stack.append(names.get(named[1]))
        elif instruction.opname in ("BUILD_TUPLE", "BUILD_LIST"):
            stack.append(_Made(dict(enumerate(taken(count)))))
        elif instruction.opname == "BUILD_CONST_KEY_MAP":
            keys = list(map(_Constant, taken(1)[0].value))
            stack.append(_dict(keys, taken(count)))
        elif instruction.opname == "BUILD_MAP":
            values = taken(2 * count)
            stack.append(_dict(values[::2], values[1::2]))
        else:
            return None
        if stack and stack[-1] is _REFUSED:
            return None
    return None


def _dict(keys: Sequence[Any], values: Sequence[Any]) -> Any:
    """Keys are plain names: their texts tell them apart."""
    if not all(isinstance(one, _Constant) and type(one.value) is str and "." not in one.value for one in keys):
        return _REFUSED
    return _Made({one.value: value for one, value in zip(keys, values, strict=True)})


def _places(made: Any, path: str) -> list[str]:
    if made is _READ:
        return [path]
    if not isinstance(made, _Made):
        return []
    return [place for name, member in made.members.items() for place in _places(member, f"{path}.{name}")]


def returned_at(reads: Sequence[str]) -> dict[int, str]:
    """The places of values that the body only returns, by the number of their read."""
    return {
        number: told.removeprefix(RETURNED).removeprefix(_AS_FLOAT)
        for number, told in enumerate(reads)
        if told.startswith(RETURNED)
    }


def given(told: str, value: Any) -> Any:
    """What the body returns of a value that was read, and is told so."""
    return float(value) if told.startswith(RETURNED + _AS_FLOAT) else value


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
