"""What functions with a backward pass of their own keep for it beside ``save_for_backward``.

Autograd tells hooks of what it saves, and of nothing that a user's function sets as an attribute (``ctx.mask = mask``).
Such tensors are those of the run that made them. A recorded whole step has both passes in one run; where the backward
pass is recorded apart it would read them in every call to come, so that a gradient would be silently wrong.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import torch

from capture.key.pytree import PLAIN_TYPES
from capture.torch_private.autograd import function_of
from capture.torch_private.subclasses import is_wrapper

_MOST = 10_000  # objects that are looked at


def keeper(nodes: Iterable[Any], reached: Collection[int], own: Collection[int]) -> type | None:
    """The function of one of these nodes that keeps tensors in attributes; None if there is none.

    ``known``: objects of Python state, by ``id``: what they hold is found there in each call. ``own``: storages of
    arguments and of what the run made, by ``id``."""
    for node in nodes:
        kind = function_of(node)
        if kind is not None and _reaches_tensors(list(getattr(node, "__dict__", {}).values()), reached, own):
            return kind
    return None


def _may_change(tensor: torch.Tensor, own: Collection[int]) -> bool:
    """Whether it may change: all but a table of numbers that was there before, as the ranks of a device mesh are."""
    if (
        tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.layout is not torch.strided
        or is_wrapper(type(tensor))
    ):
        return True
    return id(tensor.untyped_storage()) in own


def _reaches_tensors(stack: list[Any], reached: Collection[int], own: Collection[int]) -> bool:
    """Whether a tensor hangs on one of these objects. More objects than can be looked at count as one."""
    seen = set[int]()
    kept = list[Any]()  # so that no ``id`` is used twice
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            if _may_change(value, own):
                return True
            continue
        if type(value) in PLAIN_TYPES or id(value) in seen or id(value) in reached:
            continue
        if len(seen) >= _MOST:
            return True
        seen.add(id(value))
        kept.append(value)
        stack.extend(_held_by(value))
    return False


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, (type, types.ModuleType, torch.Generator)):
        return ()
    if isinstance(value, (list, tuple, deque, Set)):
        return tuple(value)
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return (*cells, *(value.__defaults__ or ()))
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return (*getattr(value, "__dict__", {}).values(), *[getattr(value, name, None) for name in slots])
