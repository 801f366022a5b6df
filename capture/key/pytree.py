"""Open the structures that calls take and return, and close them again around other leaves.

Opened are tuples, lists, dicts, namedtuples, dataclasses, attrs classes, objects of plain classes (``objects``), types
registered here or with torch's pytree, and tensors that hold other tensors, such as a ``DTensor``. ``torch.utils``
treats a plain dataclass as a leaf, so tensors in one would be missed there.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from capture.core.data import frozen
from capture.key import objects
from capture.key.attributes import in_slot, names_of, plain_class, slots_of
from capture.key.objects import Visit
from capture.key.tensor_kind import PLAIN_TYPES as PLAIN_TYPES
from capture.key.tensor_kind import TensorKind
from capture.torch_private import capabilities
from capture.torch_private.subclasses import is_wrapper, open_wrapper

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

Child = tuple[str, Any]
"""Suffix of the path (``".k"`` or ``".0"``) and the value."""


@frozen(eq=False)
class Shell:
    """A tensor subclass without the tensors it holds: ``members`` take the places of those in ``names``."""

    kind: Any
    names: tuple[str, ...]
    others: dict[str, Any]
    """Its other attributes, by name, as ``__tensor_flatten__`` gives them."""
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    members: tuple[Any, ...]
    tensor_kind: TensorKind | None
    """Its own class and attributes, where they say more than the tensors it holds."""

    @classmethod
    def of(cls, value: torch.Tensor) -> Shell:
        """The shell of a tensor, and the tensor's members."""
        held, context = open_wrapper(value)
        tensors = {name: one for name, one in held.items() if issubclass(type(one), torch.Tensor)}
        others = {name: one for name, one in held.items() if name not in tensors}
        shape, stride = value.shape, value.stride()
        members, tensor_kind = tuple(tensors.values()), TensorKind.of(value)
        return cls(type(value), tuple(tensors), others, context, shape, stride, members, tensor_kind)

    def around(self, members: list[Any]) -> Any:
        """The tensor put together around these members; a shell again if the members are no tensors."""
        if not all(issubclass(type(member), torch.Tensor) for member in members):
            return attrs.evolve(self, members=tuple(members))
        held = self.others | dict(zip(self.names, members, strict=True))
        made = self.kind.__tensor_unflatten__(held, self.context, self.shape, self.stride)
        return made if self.tensor_kind is None else self.tensor_kind.given_to(made)


def field_names(kind: type) -> tuple[str, ...] | None:
    """Field names of a dataclass or attrs class, else None."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    return None


def is_namedtuple(kind: type) -> bool:
    """Whether it is a tuple type with named fields."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_container(value: object) -> bool:
    """True if ``children`` can open the value."""
    kind = type(value)
    if kind in (tuple, list, dict, OrderedDict, defaultdict) or is_namedtuple(kind):
        return True
    if kind is Shell or is_wrapper(kind):
        return True
    if kind is torch.Size or issubclass(type(value), (torch.Tensor, torch.nn.Module, type)):
        return False
    return kind in objects.registered or capabilities.is_registered_container(kind) or is_object(kind)


_with_fields: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def has_fields(kind: type) -> bool:
    """Whether it is a dataclass or attrs class."""
    known = _with_fields.get(kind)
    if known is None:
        known = _with_fields[kind] = field_names(kind) is not None
    return known


def is_object(kind: type) -> bool:
    """Whether objects of this class are opened member by member."""
    return kind in objects.opened or has_fields(kind)


def is_registered(kind: type) -> bool:
    """Whether somebody registered how objects of this class are opened."""
    return kind in objects.registered or capabilities.is_registered_container(kind)


def _name_of_key(key: Any) -> str:
    """A tensor would be asked for its values, which a capture cannot give."""
    return f"tensor {id(key):x}" if isinstance(key, torch.Tensor) else f"{key}"


def children(value: Any) -> list[Child]:
    """The direct members of a container, in a stable order; a field that is not set yet is left out."""
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):
        return [(f".{_name_of_key(key)}", value[key]) for key in value]
    if is_namedtuple(kind):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if kind in (tuple, list):
        return [(f".{index}", member) for index, member in enumerate(value)]
    if kind is Shell or is_wrapper(kind):
        shell = value if kind is Shell else Shell.of(value)
        return [(f".{name}", member) for name, member in zip(shell.names, shell.members, strict=True)]
    if kind in objects.registered:
        flat, _ = objects.registered[kind][0](value)
        return [(f".{number}", member) for number, member in enumerate(flat)]
    if capabilities.is_registered_container(kind):
        members, _ = capabilities.open_registered(value)
        names = list(value.keys()) if issubclass(type(value), dict) else range(len(members))
        return [(f".{name}", member) for name, member in zip(names, members, strict=False)]
    if objects.is_plain(kind):
        return [(objects.suffix_of(name), member) for name, member in objects.members(value)]
    names_of_fields = field_names(kind) or ()
    return [(f".{name}", getattr(value, name)) for name in names_of_fields if hasattr(value, name)]


def leaves(value: Any, path: str = "", visit: Visit | None = None) -> Iterator[Child]:
    """Depth-first leaves with their paths; an empty container has none, nor has an object that was met before."""
    visit = Visit() if visit is None else visit
    if not is_container(value):
        yield path, value
    elif is_new(value, visit):
        visit.enter()
        for suffix, member in children(value):
            yield from leaves(member, path + suffix, visit)
        visit.depth -= 1


def leaf_at(value: Any, path: str) -> Any:
    """The leaf with this path; None where there is none."""
    return next((leaf for found, leaf in leaves(value) if found == path), None)


CHANGEABLE = (list, dict, OrderedDict, defaultdict)
"""Containers whose members a body may change, so that it counts whether two of a call are one."""


def is_new(container: Any, visit: Visit) -> bool:
    """Whether nothing in it was met before in this walk. Only objects can be: every other container is opened once for
    each place."""
    kind = type(container)
    return is_registered(kind) or not is_object(kind) or visit.is_new(container)


def wrappers(value: Any, path: str = "", visit: Visit | None = None) -> Iterator[Child]:
    """Tensors in the structure that hold other tensors."""
    visit = Visit() if visit is None else visit
    if issubclass(type(value), torch.Tensor) and is_wrapper(type(value)):
        yield path, value
    elif is_container(value) and is_new(value, visit):
        visit.enter()
        for suffix, member in children(value):
            yield from wrappers(member, path + suffix, visit)
        visit.depth -= 1


def replace_leaves(value: Any, replace: Callable[[Any], Any], visit: Visit | None = None) -> Any:
    """The same structure around ``replace(leaf)``; a container none of whose leaves changed is kept itself."""
    visit = Visit() if visit is None else visit
    if not is_container(value):
        return _again(value, visit) if objects.referent(value) is not None else replace(value)
    kind = type(value)
    if is_made_anew(kind):
        return _replace_members(value, replace, visit)
    members = [(suffix, member, replace_leaves(member, replace, visit)) for suffix, member in children(value)]
    kept = all(before is after for _, before, after in members)
    closed = value if kept else close(value, [after for _, _, after in members])
    return visit.made.setdefault(id(value), closed) if visit.joins and kind in CHANGEABLE else closed


def _blank(like: Any) -> Any:
    return objects.blank(type(like), is_own_dict=objects.is_own_dict(like))


def is_made_anew(kind: type) -> bool:
    """Whether objects of this class are put together member by member."""
    return is_object(kind) and not is_registered(kind) and objects.is_plain(kind)


def _again(reference: Any, visit: Visit) -> Any:
    """A weak reference to an object that was met becomes one to the object that replaces it."""
    stands = visit.made.get(id(reference()))
    return reference if stands is None else weakref.ref(stands)


def _replace_members(value: Any, replace: Callable[[Any], Any], visit: Visit) -> Any:
    """Replace the members of an object. The new object is made before its members are, as those may lead back to it."""
    if id(value) in visit.made:
        return visit.made[id(value)]
    closed = visit.made[id(value)] = _blank(value)
    members = [(name, member, replace_leaves(member, replace, visit)) for name, member in objects.members(value)]
    if all(before is after or after is closed for _, before, after in members):
        visit.made[id(value)] = value
        return value
    for name, _, after in members:
        objects.put(closed, name, after)
    return closed


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
        return tuple.__new__(kind, members)  # its own ``__new__`` may look at them: a ``PackedSequence``'s does
    if kind in (dict, OrderedDict, defaultdict):
        closed = copy.copy(value)
        closed.update(zip(value, members, strict=True))
        return closed
    if kind is Shell or is_wrapper(kind):
        return (value if kind is Shell else Shell.of(value)).around(members)
    if kind in objects.registered:
        flatten, unflatten = objects.registered[kind]
        return unflatten(members, flatten(value)[1])
    if capabilities.is_registered_container(kind):
        _, spec = capabilities.open_registered(value)
        return capabilities.close_registered(members, spec)
    if objects.is_plain(kind):
        made = _blank(value)
        for (name, _), member in zip(objects.members(value), members, strict=True):
            objects.put(made, name, member)
        return made
    closed = copy.copy(value)
    fields = [suffix[1:] for suffix, _ in children(value)]
    for field, member in zip(fields, members, strict=True):
        object.__setattr__(closed, field, member)  # frozen classes too
    return closed


def closer(value: Any) -> Callable[[list[Any]], Any] | None:
    """``close`` for this value, prepared once; None where ``close`` depends on the value's present state."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind
    if is_namedtuple(kind):
        return functools.partial(tuple.__new__, kind)
    if kind in (dict, OrderedDict):
        keys = tuple(value)
        return lambda members: kind(zip(keys, members, strict=True))
    if kind is Shell or is_wrapper(kind) or kind in objects.registered:
        return None
    if capabilities.is_registered_container(kind):
        _, spec = capabilities.open_registered(value)
        return lambda members: capabilities.close_registered(members, spec)
    return None


def count_tensors(value: object, *, limit: int = 1000) -> int:
    """Tensors inside an object that ``children`` cannot open, looking at most at ``limit`` members."""
    seen: set[int] = set()
    stack: list[Any] = [value]
    count = 0
    while stack and len(seen) < limit:
        item = stack.pop()
        if id(item) in seen or type(item) in PLAIN_TYPES or issubclass(type(item), (type, torch.nn.Module)):
            continue
        seen.add(id(item))
        if issubclass(type(item), torch.Tensor):
            count += 1
        elif issubclass(type(item), dict):
            stack.extend(dict.values(item))
        elif issubclass(type(item), (list, tuple, set, frozenset)):
            stack.extend(plain_class(item).__iter__(item))
        else:
            stack.extend((names_of(item) or {}).values())
            stack.extend(in_slot(slot, item) for _, slot, _ in slots_of(type(item)))
    return count


def result_leaves(result: Any) -> list[Child]:
    """Leaves of what a body returned, named ``output``, ``output.0``, ``output.logits`` ..."""
    return list(leaves(result, "output"))
