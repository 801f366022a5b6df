"""Whether a call of torch warned, found out without touching the warning filters, which belong to all threads.

For a warning of C code the interpreter uses the globals of the Python function that made the call. It notes the message
in their ``__warningregistry__``, which it creates if need be; and where their ``__name__`` is None, as while modules
are torn down, it drops the warning. So the call is made by a function with globals of its own: the warning is not
shown, raises nothing, and the registry tells that there was one.
"""

from __future__ import annotations

import _warnings
import types
from collections.abc import Callable
from typing import Any

_REGISTRY = "__warningregistry__"


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


CODE = _call.__code__
"""What runs below it is no part of a body: a call is tried out."""


def warned(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """What a function gives, and whether it warned: one in C, or one in Python that calls such a one itself. The
    warning is dropped."""
    own: dict[str, Any] = {"__name__": None}
    if isinstance(function, types.FunctionType):
        own = {name: value for name, value in function.__globals__.items() if name != _REGISTRY} | own
        same = types.FunctionType(function.__code__, own, None, function.__defaults__, function.__closure__)
        same.__kwdefaults__ = function.__kwdefaults__
        function = same
    return types.FunctionType(CODE, own)(function, args, kwargs), _REGISTRY in own


def _is_told() -> bool:
    """Whether this interpreter treats warnings as described above."""
    try:
        return warned(_warnings.warn, "a probe of torch-capture") == (None, True)
    except Warning:
        return False


CAN_TELL = _is_told()
"""False where the interpreter does otherwise: a warning comes out then as any other, and nothing tells of it."""
