"""Functions of ``math``, ``sum`` and ``float``, in a run with noted numbers.

They are C code, which reads a number without calling a method of it. For one undone run the module has functions in
their place that know noted numbers, so ``1 / math.sqrt(1 - beta ** step)`` is a formula. A tensor that one of them gets
is read as by ``item()``. All threads see that, so it is done only where no other thread runs. ``float`` is a class by
which libraries tell what they get: only users' modules have another one, as a global.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import override

from capture.core.interrupts import guarded
from capture.key.packages import users_modules
from capture.key.pytree import TENSOR_TYPES
from capture.runtime.noted_numbers import ASKING, MATH, Noted, NotedFloat, Noting, are_numbers, has_float

Result = TypeVar("Result")
_SUM = sum
_FUNCTIONS = {name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")}


def noting_math(noting: Noting, run: Callable[[], Result]) -> Result:
    """Run something while the functions of ``math``, ``sum`` and ``float`` note what they get."""

    own = {name: function for name, function in _FUNCTIONS.items() if vars(math).get(name) is function}  # not a user's
    is_own_sum, as_float = vars(builtins).get("sum") is _SUM, _float_of(noting)
    namespaces = [
        vars(sys.modules[name]) for name in users_modules() if type(sys.modules.get(name)) is types.ModuleType
    ]

    def put_back(_: Sequence[BaseException] = ()) -> None:
        vars(math).update(own)
        if is_own_sum:
            vars(builtins)["sum"] = _SUM
        for names in namespaces:
            if names.get("float") is as_float:
                del names["float"]

    def replaced() -> Result:
        vars(math).update({name: functools.partial(_called, noting, name) for name in own})
        if is_own_sum:
            vars(builtins)["sum"] = functools.partial(_summed, noting)
        for names in namespaces:
            names.setdefault("float", as_float)
        result = run()
        put_back()
        return result

    return guarded(replaced, (), put_back)


class _OfFloat(type):
    """The class of what stands for ``float``, which code also asks ``isinstance`` of."""

    noting: Noting

    @override
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = [_read(one) for one in args]
        if not kwargs and len(given) == 1 and are_numbers(given) and isinstance(given[0], Noted):
            return given[0] if type(given[0]) is NotedFloat else cls.noting.computed("float", given)
        return float(*given, **kwargs)

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, float)

    @override
    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, float)


def _float_of(noting: Noting) -> type:
    return _OfFloat("float", (float,), {"noting": noting, "stands_for": float})


def _read(value: Any) -> Any:
    """The number that a function in C reads of a tensor; anything else as it is."""
    is_read = type(value) in TENSOR_TYPES and value.numel() == 1 and not value.is_complex()
    return torch.Tensor.item(value) if is_read else value


def _called(noting: Noting, name: str, *given: Any, **kwargs: Any) -> Any:
    args = [_read(one) for one in given]
    if not kwargs and f"math.{name}" in MATH and any(isinstance(one, Noted) for one in args):
        return noting.computed(f"math.{name}", args)
    if not kwargs and len(args) == 1 and isinstance(args[0], Noted) and noting.asks and f"math.{name}" in ASKING:
        return noting.asked(f"math.{name}", args, _FUNCTIONS[name](*args))
    if any(isinstance(one, Noted) for one in (*args, *kwargs.values())):
        noting.is_read = True
    return _FUNCTIONS[name](*args, **kwargs)


def _summed(noting: Noting, items: Iterable[Any], /, start: Any = 0) -> Any:
    """``sum``, whose result of floats is one formula. Nobody sees when it adds numbers: they are gathered first."""
    numbers, rest = list[Any](), iter(items)
    for item in rest if are_numbers((start,)) else ():
        numbers.append(item)
        if not are_numbers((item,)):
            break
    else:
        every = (start, *numbers)
        if are_numbers(every) and has_float(every) and any(isinstance(one, Noted) for one in every):
            return noting.computed("sum", every)
    return _SUM(itertools.chain(numbers, rest), start)
