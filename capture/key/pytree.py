"""Open the structures that calls take and return, and close them again around other leaves.

Opened are tuples, lists, dicts, namedtuples, dataclasses, attrs classes, the types registered with torch's pytree, and
tensors that hold other tensors, such as a ``DTensor``. ``torch.utils`` treats a plain dataclass as a leaf, so tensors
in one would be missed there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from capture.torch_private import capabilities
from capture.torch_private.subclasses import is_wrapper, open_wrapper

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
PLAIN_TYPES = frozenset({
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, range, slice, type(Ellipsis), type(NotImplemented),
})  # fmt: skip

Child = tuple[str, Any]
"""Suffix of the path (``".k"`` or ``".0"``) and the value."""


@attrs.frozen(eq=False)
class Shell:
    """A tensor subclass without the tensors it holds: ``members`` stand for those in ``names``."""

    kind: Any
    names: tuple[str, ...]
    others: dict[str, Any]
    """What it holds beside tensors."""
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    members: tuple[Any, ...]

    @classmethod
    def of(cls, value: torch.Tensor) -> Shell:
        """Of a tensor, and its own members."""
        held, context = open_wrapper(value)
        tensors = {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}
        others = {name: one for name, one in held.items() if name not in tensors}
        shape, stride = value.shape, value.stride()
        return cls(type(value), tuple(tensors), others, context, shape, stride, tuple(tensors.values()))

    def around(self, members: list[Any]) -> Any:
        """The tensor around these, or a shell again if they only stand for tensors."""
        if not all(isinstance(one, torch.Tensor) for one in members):
            return attrs.evolve(self, members=tuple(members))
        held = self.others | dict(zip(self.names, members, strict=True))
        return self.kind.__tensor_unflatten__(held, self.context, self.shape, self.stride)


def field_names(kind: type) -> tuple[str, ...] | None:
    """Field names of a dataclass or attrs class, else None."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    return None


def is_namedtuple(kind: type) -> bool:
    """A tuple type with named fields."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_container(value: object) -> bool:
    """True if ``children`` can open the value."""
    kind = type(value)
    if kind in (tuple, list, dict, OrderedDict, defaultdict) or is_namedtuple(kind):
        return True
    if kind is Shell or is_wrapper(kind):
        return True
    if kind is torch.Size or isinstance(value, (torch.Tensor, torch.nn.Module, type)):
        return False
    return field_names(kind) is not None or capabilities.is_registered_container(kind)


def children(value: Any) -> list[Child]:
    """The direct members of a container, in a stable order; a field that is not set yet is left out."""
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):
        return [(f".{key}", value[key]) for key in value]
    if is_namedtuple(kind):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if kind in (tuple, list):
        return [(f".{index}", member) for index, member in enumerate(value)]
    if kind is Shell or is_wrapper(kind):
        shell = value if kind is Shell else Shell.of(value)
        return [(f".{name}", member) for name, member in zip(shell.names, shell.members, strict=True)]
    if capabilities.is_registered_container(kind):
        members, _ = capabilities.open_registered(value)
        names = list(value.keys()) if isinstance(value, dict) else range(len(members))
        return [(f".{name}", member) for name, member in zip(names, members, strict=False)]
    names_of_fields = field_names(kind) or ()
    return [(f".{name}", getattr(value, name)) for name in names_of_fields if hasattr(value, name)]


def leaves(value: Any, path: str = "") -> Iterator[Child]:
    """Depth-first leaves with their paths; an empty container has none."""
    if is_container(value):
        for suffix, member in children(value):
            yield from leaves(member, path + suffix)
    else:
        yield path, value


def wrappers(value: Any, path: str = "") -> Iterator[Child]:
    """Tensors in the structure that hold other tensors."""
    if isinstance(value, torch.Tensor) and is_wrapper(type(value)):
        yield path, value
    elif is_container(value):
        for suffix, member in children(value):
            yield from wrappers(member, path + suffix)


def replace_leaves(value: Any, replace: Callable[[Any], Any]) -> Any:
    """The same structure around ``replace(leaf)``; a container none of whose leaves changed is kept itself."""
    if not is_container(value):
        return replace(value)
    members = [(suffix, member, replace_leaves(member, replace)) for suffix, member in children(value)]
    if all(before is after for _, before, after in members):
        return value
    return close(value, [after for _, _, after in members])


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """The same structure around ``replace(leaf)``, with every container new."""
    if not is_container(value):
        return replace(value)
    return close(value, [rebuild(member, replace) for _, member in children(value)])


def close(value: Any, members: list[Any]) -> Any:
    """A new container like ``value`` around other members, in the order of ``children``."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(members)
    if is_namedtuple(kind):
        return kind(*members)
    if kind in (dict, OrderedDict, defaultdict):
        closed = copy.copy(value)
        closed.update(zip(value, members, strict=True))
        return closed
    if kind is Shell or is_wrapper(kind):
        return (value if kind is Shell else Shell.of(value)).around(members)
    if capabilities.is_registered_container(kind):
        _, spec = capabilities.open_registered(value)
        return capabilities.close_registered(members, spec)
    closed = copy.copy(value)
    names = [suffix[1:] for suffix, _ in children(value)]
    for name, member in zip(names, members, strict=True):
        object.__setattr__(closed, name, member)  # frozen classes too
    return closed


def count_tensors(value: object, *, limit: int = 1000) -> int:
    """Tensors inside an object that ``children`` cannot open, looking at most at ``limit`` members."""
    seen: set[int] = set()
    stack: list[object] = [value]
    found = 0
    while stack and len(seen) < limit:
        item = stack.pop()
        if id(item) in seen or type(item) in PLAIN_TYPES or isinstance(item, (type, torch.nn.Module)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found += 1
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        else:
            stack.extend(getattr(item, "__dict__", {}).values())
            slots = getattr(type(item), "__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            stack.extend(getattr(item, name) for name in names if hasattr(item, name))
    return found


def result_leaves(result: Any) -> list[Child]:
    """Leaves of what a body returned, named ``output``, ``output.0``, ``output.logits`` ..."""
    return list(leaves(result, "output"))
