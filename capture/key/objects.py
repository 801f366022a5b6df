"""Objects of plain Python classes, opened member by member: batches, caches, contexts, results.

An object is opened without running code of its class: its members are in its ``__dict__``, in its slots, and, for a
subclass of ``dict`` or ``list``, in the container itself. Whether a class is opened never changes back, so that all
parts of one call agree. Opened are classes of which an instance was seen to hold tensors, and classes whose instances
come and go, so that identity tells nothing. All other objects are told apart by identity, such as a config that
outlives its calls, or a trainer: an argument that holds modules or optimizers is a program's own state, and no batch
of tensors. Results that hold such are opened like all others.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.key.attributes import dict_of
from capture.key.packages import package_of
from capture.native import native

MOST_CLASSES = 1024  # whose layout is remembered: a program may make classes for as long as it runs
_MOST_MEMBERS = 400
_MOST_NESTED = 100
"""Members that are looked at for tensors. An object with more of them is not a batch, but part of the program."""
_COME_AND_GO, _STATE_COMES_AND_GOES = 2, 4
"""So many instances of a class, told apart by identity, have to die before the class is opened; and so many where they
hold modules."""
_CLOSED_PACKAGES = frozenset({"builtins", "threading", "_thread", "logging", "_io", "weakref", "socket", "re", "typing",
                              "concurrent", "multiprocessing", "queue", "asyncio", "capture"})  # fmt: skip
SHARDING = "torch.distributed.fsdp"
_OPEN_OF_TORCH = ("torch.optim", "torch.distributions", SHARDING)
_NEVER = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator, type, BaseException)


@functools.lru_cache(maxsize=4096)
def closed_package(module: Any) -> bool:
    """Whether objects of classes of this module are never looked into."""
    package = package_of(module)
    return package in _CLOSED_PACKAGES or (package == "torch" and not (module or "").startswith(_OPEN_OF_TORCH))


_with_state: set[type] = set()


def has_state(kind: type) -> bool:
    """Whether objects of this class, which belongs to a closed package, are looked into all the same."""
    return kind in _with_state


def find_state(values: Iterable[Any], storages: Container[int]) -> list[str]:
    """Look into objects of these classes from now on, where one holds a tensor on such a storage, by ``id``: a body
    uses it, and what the object holds next time is not known else. Gives the names of the classes."""
    names = []
    for value in values:
        members = (dict_of(value) or {}).values()  # ``vars`` asks the class for a ``__dict__``, which few of C's show
        kept = [member for member in members if type(member) is torch.Tensor and member.layout is torch.strided]
        if any(id(tensor.untyped_storage()) in storages for tensor in kept):
            _with_state.add(type(value))
            names.append(type(value).__qualname__)
    return names


# ------------------------------------------------------------------------------------------------ what an object holds


@frozen
class _Layout:
    """How the instances of one class are laid out."""

    base: type
    new: Any
    """Makes an instance without members."""
    slots: tuple[Any, ...]
    """Descriptors of their slots, those of base classes first."""
    has_dict: bool


_DEFAULT_FACTORY: Any = vars(defaultdict)["default_factory"]
_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, types.SimpleNamespace, object)


layouts: dict[type, _Layout | None] = {}
"""Of the classes that were met last: a layout keeps its class."""


def _layout_of(kind: type) -> _Layout | None:
    """The layout of a class; None for a class whose instances hold more than Python shows, or that another part of the
    library opens."""
    layout: Any = layouts.get(kind, layouts)
    if layout is layouts:
        if len(layouts) >= MOST_CLASSES:
            layouts.clear()
        layout = layouts[kind] = _find_layout(kind)
    found: _Layout | None = layout
    return found


def _find_layout(kind: type) -> _Layout | None:
    own = [base for base in kind.__mro__ if base not in _BASES]
    if issubclass(kind, _NEVER) or (not own and kind is not types.SimpleNamespace):
        return None
    base = next(base for base in _BASES if issubclass(kind, base))
    slots = [
        descriptor
        for base in reversed(own)
        for descriptor in vars(base).values()
        if type(descriptor) is types.MemberDescriptorType
    ]
    has_dict = bool(kind.__dictoffset__)
    if closed_package(kind.__module__) or kind.__basicsize__ != _size(kind, base, len(slots)):
        return None
    return _Layout(base, base.__new__, tuple(slots), has_dict)


def _size(kind: type, base: type, slots: int) -> int:
    """Bytes of an instance with so many slots and no fields that only C knows."""
    if kind is base:
        return kind.__basicsize__
    names = [f"slot{number}" for number in range(slots)]
    names += ["__dict__"] if kind.__dictoffset__ and not base.__dictoffset__ else []
    names += ["__weakref__"] if kind.__weakrefoffset__ and not base.__weakrefoffset__ else []
    return type("Probe", (base,), {"__slots__": names}).__basicsize__


def is_plain(kind: type) -> bool:
    """Whether ``members`` gives everything that an instance of this class holds."""
    return _layout_of(kind) is not None


def slots_of(kind: type) -> tuple[Any, ...]:
    """Descriptors of the slots that instances of a plain class have."""
    layout = _layout_of(kind)
    assert layout is not None
    return layout.slots


def _attributes(value: Any) -> dict[str, Any]:
    own: dict[str, Any] = native.own_dict(value)
    return own


Name = tuple[str, Any]
"""Where a member is: ``"item"`` and a key or a number, ``"slot"`` and the descriptor, ``"attribute"`` and the name."""


def members(value: Any) -> list[tuple[Name, Any]]:
    """Members of an object of a plain class, in a stable order."""
    layout = _layout_of(type(value))
    assert layout is not None
    named: list[tuple[Name, Any]] = []
    if issubclass(layout.base, dict):
        named += [(("item", key), dict.__getitem__(value, key)) for key in dict.__iter__(value)]
        if layout.base is defaultdict:
            named.append((("slot", _DEFAULT_FACTORY), value.default_factory))
    elif layout.base is list:
        named += [(("item", at), member) for at, member in enumerate(list.__iter__(value))]
    for descriptor in layout.slots:
        try:
            named.append((("slot", descriptor), descriptor.__get__(value)))
        except AttributeError:  # not set
            continue
    if layout.has_dict and (attributes := _attributes(value)) is not value:
        named += [(("attribute", name), member) for name, member in attributes.items()]
    return named


def holds(value: Any, name: str) -> bool:
    """Whether the object itself has this attribute, not only its class."""
    layout = _layout_of(type(value))
    if layout is None:
        return False
    return (layout.has_dict and name in _attributes(value)) or any(slot.__name__ == name for slot in layout.slots)


def suffix_of(name: Name) -> str:
    """What a member adds to the path of its object."""
    kind, at = name
    return f".{at.__name__}" if kind == "slot" else f".{at}"


def blank(kind: type, *, is_own_dict: bool = False) -> Any:
    """A new object of a plain class without members. ``is_own_dict``: its attributes are its items."""
    layout = _layout_of(kind)
    assert layout is not None
    made: Any = layout.new(kind)
    if is_own_dict:
        object.__setattr__(made, "__dict__", made)
    return made


def is_own_dict(value: Any) -> bool:
    """Whether the attributes of this dict are its items."""
    return issubclass(type(value), dict) and type(value).__dictoffset__ != 0 and _attributes(value) is value


def put(value: Any, name: Name, member: Any) -> None:
    """Give a new object a member."""
    kind, at = name
    if kind == "attribute":
        _attributes(value)[at] = member
    elif kind == "slot":
        at.__set__(value, member)
    elif issubclass(type(value), OrderedDict):
        OrderedDict.__setitem__(value, at, member)
    elif issubclass(type(value), dict):
        dict.__setitem__(value, at, member)
    else:
        list.append(value, member)


# ------------------------------------------------------------------------------------------------ which are opened

opened: weakref.WeakSet[type] = weakref.WeakSet()
_gone: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()


def died(kind: type) -> None:
    """An object that was told apart by identity has died."""
    _gone[kind] = _gone.get(kind, 0) + 1


def may_open(value: Any) -> bool:
    """Whether the class of this object is opened, from now on if it was not before."""
    kind = type(value)
    if kind not in opened and is_plain(kind) and (_gone.get(kind, 0) >= _COME_AND_GO or _holds(value, torch.Tensor)):
        opened.add(kind)
    return kind in opened


def may_open_argument(value: Any) -> bool:
    """As ``may_open``, for an argument."""
    kind = type(value)
    is_kept = kind not in opened and _gone.get(kind, 0) < _STATE_COMES_AND_GOES and is_state(value)
    return not is_kept and may_open(value)


def is_state(value: Any) -> bool:
    """Whether it is an object of a plain class that holds modules or optimizers, and is not opened."""
    kind = type(value)
    return kind not in opened and is_plain(kind) and _holds(value, _STATE)


_STATE = (torch.nn.Module, torch.optim.Optimizer)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def _held(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):
        return list(value.values())
    if kind in (list, tuple):
        return list(value)
    return [one for _, one in members(value)] if is_plain(kind) else ()


def _holds(value: Any, kinds: type | tuple[type, ...]) -> bool:
    seen, stack = set[int](), [value]
    while stack and len(seen) < _MOST_MEMBERS:
        part = stack.pop()
        if type(part) in _PLAIN or id(part) in seen:
            continue
        if issubclass(type(part), kinds):
            return True
        seen.add(id(part))
        stack.extend(_held(part))
    return False


def learn(value: Any, opens: Callable[[Any], bool] = may_open) -> None:
    """Open the classes of objects that a body got, gave or left, that hold tensors."""
    seen, stack = set[int](), [value]
    while stack and len(seen) < _MOST_MEMBERS:
        part = stack.pop()
        if type(part) in _PLAIN or id(part) in seen:
            continue
        seen.add(id(part))
        if is_plain(type(part)):
            opens(part)
        stack.extend(_held(part))


# ------------------------------------------------------------------------------------------------ one call


class TooDeep(TypeError):
    """Containers that no walk opens to the end."""


@define(eq=False)
class Visit:
    """The objects that were met in one walk over the structures of a call. One that is met again is the same object in
    a replay, too."""

    numbers: dict[int, int] = field(factory=dict)
    """The number of each object, by ``id``, in the order in which objects were met."""
    made: dict[int, Any] = field(factory=dict)
    """The objects that replace them, by ``id``."""
    depth: int = 0
    """How many containers are open now, one inside another."""
    joins: bool = False
    """A list or dict that is met again is replaced by what it was replaced by before, as objects are."""

    def enter(self) -> None:
        """Open one more. Raises ``TooDeep`` long before the interpreter's stack is used up: a finalizer of somebody's
        that runs at the end of the stack fails, and what it had to do is lost."""
        self.depth += 1
        if self.depth > _MOST_NESTED:
            raise TooDeep(f"a container that contains itself, or more than {_MOST_NESTED} in one another")

    def is_new(self, value: Any) -> bool:
        """Whether it is met for the first time."""
        if id(value) in self.numbers:
            return False
        self.numbers[id(value)] = len(self.numbers)
        return True


def referent(value: Any) -> Any:
    """What a weak reference refers to; None for all else."""
    return value() if type(value) is weakref.ref else None


# ------------------------------------------------------------------------------------------------ registered classes

Flatten = Callable[[Any], tuple[Sequence[Any], Hashable]]
Unflatten = Callable[[Sequence[Any], Any], Any]
registered: dict[type, tuple[Flatten, Unflatten]] = {}


def register(kind: type, flatten: Flatten, unflatten: Unflatten) -> None:
    """Open objects of exactly this class by ``flatten`` from now on."""
    registered[kind] = flatten, unflatten
