"""Kinds of modules: what decides, of a submodule that is put in another one's place, which recordings it may have.

Two modules are of one kind if they are of one class, with equal plain attributes, tensors of the same shapes, and
submodules of which that is true. A recording made with one may be bound to the tensors of the other.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.key.attributes import dict_of
from capture.key.exact import exact
from capture.key.pytree import PLAIN_TYPES

_TABLES = ("_parameters", "_buffers", "_modules")
_MOST_KINDS = 64


def kind_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Equal for modules of one kind, and hashable."""
    parts, todo, numbers = list[Any](), [module], {id(module): 0}
    for one in todo:  # which grows
        own = dict_of(one) or {}
        parts.append(type(one))
        parts += [(name, exact(value) if type(value) in _EXACT else type(value)) for name, value in own.items()]
        for name in _TABLES:
            table = own.get(name)
            for key, member in table.items() if isinstance(table, dict) else ():
                if issubclass(type(member), torch.nn.Module):
                    if id(member) not in numbers:
                        numbers[id(member)] = len(numbers)
                        todo.append(member)
                    parts.append((name, key, numbers[id(member)]))
                else:
                    parts.append((name, key, _of_tensor(member) if issubclass(type(member), torch.Tensor) else None))
    return tuple(parts)


_EXACT = PLAIN_TYPES - {slice}


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = None if torch.nn.parameter.is_lazy(tensor) else tensor.shape
    return type(tensor), shape, tensor.dtype, tensor.requires_grad


@define(eq=False)
class Kinds:
    """Numbers for kinds of modules, in the order in which they came."""

    _numbers: dict[tuple[Any, ...], int] = field(factory=dict)
    _known: dict[int, tuple[weakref.ref[Any], int]] = field(factory=dict)
    """By ``id``: guards compare what is in a module, so each is looked at once."""

    def of(self, value: Any) -> Any:
        """The number of a module's kind. Another value, and a module where there are too many kinds, as it is."""
        if not issubclass(type(value), torch.nn.Module):
            return value
        reference, number = self._known.get(id(value), (None, 0))
        if reference is not None and reference() is value:
            return number
        kind = kind_of(value)
        if kind not in self._numbers and len(self._numbers) == _MOST_KINDS:
            return value
        number = self._numbers.setdefault(kind, len(self._numbers))
        if len(self._known) >= 4 * _MOST_KINDS:
            self._known.clear()
        self._known[id(value)] = weakref.ref(value), number
        return number
