"""All that Python state is made of, as values that two worlds can be compared by."""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import queue
import random
import types
import warnings
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

_PLAIN = (bool, int, float, str, bytes, bytearray, torch.dtype, torch.Size)
_OF_MODULES = ("_parameters", "_buffers", "_modules", "_forward_hooks")


def digest(value: Any, seen: dict[int, int] | None = None) -> Any:
    """What the value is, with all that is reached from it; an object that comes again by its number."""
    seen = {} if seen is None else seen
    if value is None or type(value) in _PLAIN:
        return repr(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    found = _special(value, seen)
    return found if found is not NotImplemented else _members(value, seen)


def _special(value: Any, seen: dict[int, int]) -> Any:
    """Of what keeps its state elsewhere than in attributes and items."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().view(-1).tolist()
        left = {name: digest(one, seen) for name, one in vars(value).items()}
        grad = digest(value.grad, seen) if value.is_leaf else None
        return kind.__name__, value.dtype, tuple(value.shape), value.stride(), numbers, value.requires_grad, grad, left
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if kind is queue.SimpleQueue:
        held = [value.get() for _ in range(value.qsize())]
        for one in held:
            value.put(one)
        return [digest(one, seen) for one in held]
    if hasattr(value, "getvalue"):
        return value.getvalue()
    if isinstance(value, types.GeneratorType):
        return value.gi_frame and value.gi_frame.f_locals.get("n")
    if isinstance(value, itertools.cycle) or kind.__name__.endswith("_iterator"):
        return digest(_next_of(value), seen)
    if kind in (itertools.count, itertools.repeat):
        return repr(value)
    if kind is contextvars.ContextVar:
        return digest(value.get(), seen)
    if isinstance(value, functools._lru_cache_wrapper):
        return value.cache_info().misses, value.cache_info().currsize  # how often it was asked is no state
    return NotImplemented


def _next_of(value: Any) -> Any:
    """What an iterator gives next. From Python 3.14 on those of ``itertools`` cannot be copied: it is taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return next(copy.copy(value))
        except TypeError:
            return next(value)


def _members(value: Any, seen: dict[int, int]) -> Any:
    kind: Any = type(value)
    if isinstance(value, weakref.WeakKeyDictionary):
        return [digest(one, seen) for one in value.values()]
    if isinstance(value, weakref.WeakValueDictionary):
        return [(name, digest(one, seen)) for name, one in value.items()]
    if isinstance(value, (type, types.ModuleType)):
        names = {name: one for name, one in vars(value).items() if not name.startswith("__") and not callable(one)}
        own = isinstance(value, type) or "user" in value.__name__
        more = digest(kind, seen) if kind not in (type, types.ModuleType) else None
        return value.__name__, {name: digest(one, seen) for name, one in names.items()} if own else None, more
    if isinstance(value, types.FunctionType):
        cells = [digest(one.cell_contents, seen) for one in value.__closure__ or ()]
        return value.__name__, digest(value.__defaults__, seen), digest(vars(value), seen), cells
    if isinstance(value, functools.partial):
        return digest((value.func, value.args, value.keywords), seen)
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return value.__name__, digest(value.__self__, seen)
    if isinstance(value, BaseException):
        return kind.__name__, digest(value.args, seen)
    items: Any = None
    if isinstance(value, (list, tuple, deque)):
        items = [digest(one, seen) for one in value]
    elif isinstance(value, dict):
        items = [(digest(name, {}), digest(one, seen)) for name, one in value.items()]
    elif isinstance(value, (set, frozenset)):
        members = sorted(value, key=lambda one: repr(digest(one, {})))  # a set's own order follows from addresses
        items = [repr(digest(member, seen)) for member in members]
    return kind.__name__, items, _attributes(value, seen)


def _attributes(value: Any, seen: dict[int, int]) -> dict[str, Any]:
    """What is in its ``__dict__`` and slots; locks, and what torch keeps in a module, left out."""
    found = {}
    for name, one in getattr(value, "__dict__", {}).items():
        of_torch = isinstance(value, nn.Module) and name.startswith("_") and name not in _OF_MODULES
        if not of_torch and name != "forward" and type(one).__module__ not in ("threading", "_thread"):
            found[name] = list(one.values()) and len(one) if name == "_forward_hooks" else digest(one, seen)
    for kind in type(value).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if not name.startswith("__"):
                found[name] = digest(getattr(value, name, None), seen)
    return found
