"""Functions of ``math``, and ``sum``, in a run with noted numbers.

They are C code, which reads a number without calling a method of it. For one undone run the module has functions in
their place that know noted numbers, so ``1 / math.sqrt(1 - beta ** step)`` is a formula. All threads see that, so it is
done only where no other thread runs.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from capture.native import native
from capture.runtime.noted_numbers import ASKING, MATH, Noted, Noting, are_numbers, has_float

Result = TypeVar("Result")
_SUM = sum
_FUNCTIONS = {name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")}


def noting_math(noting: Noting, run: Callable[[], Result]) -> Result:
    """Run something while the functions of ``math``, and ``sum``, note what they get."""

    own = {name: function for name, function in _FUNCTIONS.items() if vars(math).get(name) is function}  # not a user's
    is_own_sum = vars(builtins).get("sum") is _SUM

    def put_back(_: Sequence[BaseException] = ()) -> None:
        vars(math).update(own)
        if is_own_sum:
            vars(builtins)["sum"] = _SUM

    def replaced() -> Result:
        vars(math).update({name: functools.partial(_called, noting, name) for name in own})
        if is_own_sum:
            vars(builtins)["sum"] = functools.partial(_summed, noting)
        result = run()
        put_back()
        return result

    found: Result = native.guarded(replaced, (), put_back)
    return found


def _called(noting: Noting, name: str, *args: Any, **kwargs: Any) -> Any:
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
