"""Python state as plain values, by which two worlds are compared."""

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
    """A value and all that can be reached from it; an object that comes again is given by its number."""
    seen = {} if seen is None else seen
    if value is None or type(value) in _PLAIN:
        return repr(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    special = _special(value, seen)
    return special if special is not NotImplemented else _members(value, seen)


def _special(value: Any, seen: dict[int, int]) -> Any:
    """The digest of kinds that keep state elsewhere than in attributes and items, else ``NotImplemented``."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().contiguous().view(-1).tolist()
        left = {name: digest(attribute, seen) for name, attribute in vars(value).items()}
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
        for queued in held:
            value.put(queued)
        return [digest(queued, seen) for queued in held]
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
        return value.cache_info().misses, value.cache_info().currsize  # hits are left out, as replays ask less often
    return NotImplemented


def _next_of(value: Any) -> Any:
    """What an iterator gives next, from a copy. From Python 3.14 on ``itertools`` cannot be copied: the item is
    taken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return next(copy.copy(value))
        except TypeError:
            return next(value)


def _members(value: Any, seen: dict[int, int]) -> Any:
    kind: Any = type(value)
    if isinstance(value, weakref.WeakKeyDictionary):
        return [digest(held, seen) for held in value.values()]
    if isinstance(value, weakref.WeakValueDictionary):
        return [(name, digest(held, seen)) for name, held in value.items()]
    if isinstance(value, (type, types.ModuleType)):
        names = {name: held for name, held in vars(value).items() if not name.startswith("__") and not callable(held)}
        own = isinstance(value, type) or "user" in value.__name__
        more = digest(kind, seen) if kind not in (type, types.ModuleType) else None
        return value.__name__, {name: digest(held, seen) for name, held in names.items()} if own else None, more
    if isinstance(value, types.FunctionType):
        cells = [digest(held.cell_contents, seen) for held in value.__closure__ or ()]
        return value.__name__, digest(value.__defaults__, seen), digest(vars(value), seen), cells
    if isinstance(value, functools.partial):
        return digest((value.func, value.args, value.keywords), seen)
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        return value.__name__, digest(value.__self__, seen)
    if isinstance(value, BaseException):
        return kind.__name__, digest(value.args, seen)
    items: Any = None
    if isinstance(value, (list, tuple, deque)):
        items = [digest(held, seen) for held in value]
    elif isinstance(value, dict):
        items = [(digest(name, {}), digest(held, seen)) for name, held in value.items()]
    elif isinstance(value, (set, frozenset)):
        members = sorted(value, key=lambda held: repr(digest(held, {})))  # the order of a set depends on addresses
        items = [repr(digest(member, seen)) for member in members]
    return kind.__name__, items, _attributes(value, seen)


def _attributes(value: Any, seen: dict[int, int]) -> dict[str, Any]:
    """The contents of ``__dict__`` and slots, without locks and without a module's own tables."""
    attributes = {}
    for name, member in getattr(value, "__dict__", {}).items():
        of_torch = isinstance(value, nn.Module) and name.startswith("_") and name not in _OF_MODULES
        if not of_torch and name != "forward" and type(member).__module__ not in ("threading", "_thread"):
            attributes[name] = (
                list(member.values()) and len(member) if name == "_forward_hooks" else digest(member, seen)
            )
    for kind in type(value).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if not name.startswith("__"):
                attributes[name] = digest(getattr(value, name, None), seen)
    return attributes
