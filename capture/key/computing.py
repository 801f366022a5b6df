"""Functions that only compute: of numbers they make a number, and read and leave nothing else, whoever calls them how
often, as ``lambda epoch: min(1.0, (epoch + 1) / warmup)`` of a learning rate's schedule does."""

from __future__ import annotations

import dis
import functools
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any

from capture.key.code_names import MISSING

_PLAIN = (bool, int, float, str, type(None))
_BUILTINS = (abs, bool, divmod, float, int, len, max, min, pow, range, round, sum)
_LEAVING = ("STORE_ATTR", "STORE_S", "STORE_GLOBAL", "STORE_NAME", "DELETE_", "IMPORT_", "LOAD_NAME")
_OTHER_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_DEEPEST = 4  # functions that call each other


def holders_read(function: Any) -> list[Any] | None:
    """The cells and dicts of globals that a function which only computes may read. None for one that may do more."""
    found: list[Any] = []
    return found if _computes(function, found, _DEEPEST) else None


def _computes(value: Any, found: list[Any], deepest: int) -> bool:
    """Whether this is such a function, or a value that is the same as long as nobody puts another one in its place."""
    if issubclass(type(value), type):
        value = vars(value).get("stands_for", value)  # as ``float`` in ``runtime.noted_math``
    if _is_plain(value) or value is math or any(value is one for one in _BUILTINS):
        return True
    if type(value) is types.BuiltinFunctionType:
        return value.__self__ is math
    if type(value) is functools.partial:
        given = (*value.args, *value.keywords.values())
        return not vars(value) and all(map(_is_plain, given)) and _computes(value.func, found, deepest)
    if type(value) is not types.FunctionType or vars(value) or deepest == 0:
        return False
    given = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if not all(map(_is_plain, given)):
        return False
    found += [value, value.__globals__, *(value.__closure__ or ())]
    return all(_computes(one, found, deepest - 1) for one in _named(value))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


_UNKNOWN = object()
"""Stands for what no function that only computes has."""


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What the function's code finds by name, and ``_UNKNOWN`` where it does more than look up and compute."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            yield _UNKNOWN
    code = function.__code__
    names = set(code.co_freevars)
    if code.co_flags & _OTHER_KINDS or any(type(one) is types.CodeType for one in code.co_consts):
        yield _UNKNOWN
    for step in dis.get_instructions(code):
        if step.opname.startswith(_LEAVING) or (step.opname == "STORE_DEREF" and step.argval in names):
            yield _UNKNOWN
        elif step.opname == "LOAD_GLOBAL":
            yield function.__globals__.get(step.argval, function.__builtins__.get(step.argval, MISSING))
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval not in vars(math):
            yield _UNKNOWN
