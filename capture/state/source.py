"""Where Python objects keep values: a ``Source`` each, and all sources of a module at once."""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from capture.core.data import define
from capture.key.attributes import (
    MISSING,
    in_slot,
    item_of,
    names_of,
    own_value,
    plain_class,
    put_in_slot,
    put_own,
    slot_of,
    value_in_c,
)
from capture.native import native, seen

SourceKind = Literal[
    "argument", "attribute", "parameter", "buffer", "module", "item", "closure", "global", "root", "weak", "call",
    "slot", "context", "scope",
]  # fmt: skip
"""``weak``: in the ``__dict__`` of what a weak reference refers to. ``call``: what a function gives. ``slot``: by a
descriptor of the class, of an object or of what a weak reference refers to. ``context``: of a context variable.
``scope``: a module of which only the names are looked at."""
_TABLES = {"parameter": "_parameters", "buffer": "_buffers", "module": "_modules"}
MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}


@seen
@define(eq=False)
class Source:
    """Where a value is kept: ``holder`` plus ``name``. ``parent`` leads back to the root.

    Never changed. Not frozen, since one is made for every attribute a walk meets, and freezing doubles the cost.
    """

    kind: SourceKind
    holder: Any
    name: Any
    path: str
    parent: Source | None = None

    def get(self) -> Any:
        """The value kept now, or ``MISSING``."""
        try:
            if self.kind in ("root", "scope"):
                return self.holder
            if self.kind == "closure":
                return self.holder.cell_contents
            if self.kind == "call":
                return self.holder()
            if self.kind == "slot":
                return in_slot(self.name, self._kept())
            if self.kind == "weak":
                return names_of(self.holder()).get(self.name, MISSING)
            if self.kind == "context":
                return self.holder.get(MISSING) if self.name is None else self.holder.get(self.name, MISSING)
            if self.kind == "attribute":
                own = own_value(self.holder, self.name)
                if own is not MISSING:
                    return own
                if issubclass(type(self.holder), type):  # names of its bases are kept in these
                    return MISSING
                if slot_of(type(self.holder), self.name) is not None:  # not set; ``__getattr__`` would run
                    return MISSING
                if issubclass(type(self.holder), torch.Tensor):  # a watch may have put something around ``grad``
                    return getattr(self.holder, self.name)
                return value_in_c(self.holder, self.name)
            return item_of(self.holder, self.name)
        except (AttributeError, KeyError, IndexError, ValueError):
            return MISSING

    def set(self, value: Any) -> None:
        """Put another value here, as an assignment in the body would."""
        if self.kind == "closure":
            self.holder.cell_contents = value
        elif self.kind == "context":
            _ = self.holder.set(value) if self.name is None else self.holder.run(self.name.set, value)
        elif self.kind == "slot":
            put_in_slot(self.name, self._kept(), value)
        elif issubclass(type(self.holder), type):
            type.__setattr__(self.holder, self.name, value)
        elif self.kind == "attribute":
            if own_value(self.holder, self.name) is not MISSING:
                put_own(self.holder, self.name, value)
            else:
                object.__setattr__(self.holder, self.name, value)
        elif self.kind != "root":
            plain_class(self.holder).__setitem__(self.holder, self.name, value)

    def remove(self) -> None:
        """Remove the value, as if it had never been assigned."""
        if self.kind == "slot":
            put_in_slot(self.name, self._kept(), MISSING)
        elif self.kind == "attribute" or issubclass(type(self.holder), type):
            put_own(self.holder, self.name, MISSING)
        elif issubclass(type(self.holder), dict):
            self.holder.pop(self.name, None)

    def _kept(self) -> Any:
        """What has the slot: a guard may have a weak reference to it."""
        return self.holder() if type(self.holder) is weakref.ref else self.holder

    def put(self, value: Any) -> None:
        """Put a value here; ``MISSING`` removes it."""
        if value is MISSING:
            self.remove()
        else:
            self.set(value)

    def below(self, value: Any) -> Any:
        """What is kept at the same place below another object (``among``), without a source of its own for the usual
        places: replays set gradients of many parameters."""
        if self.kind in _TABLES and issubclass(type(value), torch.nn.Module):
            table = getattr(value, _TABLES[self.kind])
            if type(table) is dict:
                return table.get(self.name, MISSING)
        elif self.kind == "item" and type(value) is dict and type(self.name) is str:
            return value.get(self.name, MISSING)
        elif self.kind == "item" and type(value) is list and type(self.name) is int:
            return value[self.name] if 0 <= self.name < len(value) else MISSING
        return self.among(value).get()

    def among(self, value: Any) -> Source:
        """The same place below another object, ``value``, which replaces the object that this place is in."""
        if self.kind in _TABLES and issubclass(type(value), torch.nn.Module):
            return Source(self.kind, getattr(value, _TABLES[self.kind]), self.name, self.path)
        if self.kind == "closure" and issubclass(type(value), types.FunctionType):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=False))
            return Source(self.kind, cells.get(self.path.rpartition(":")[2]), self.name, self.path)
        return Source(self.kind, value, self.name, self.path)

    def is_in_argument(self) -> bool:
        """Whether the way to it begins at an argument, which is another object in each call."""
        root = [*self.chain()][-1]
        return root.kind == "root" and root.path not in ("self", "function")

    def chain(self) -> Iterator[Source]:
        """This source and all above it."""
        source: Source | None = self
        while source is not None:
            yield source
            source = source.parent


def lasting_place(holder: Any, name: str, path: str) -> Source | None:
    """The place of an attribute that an object itself keeps, by a weak reference to the object where it takes one; None
    where it keeps none by this name."""
    slot, attributes = slot_of(type(holder), name), names_of(holder)
    if slot is None and (type(attributes) is not dict or name not in attributes):
        return None
    try:
        kept: Any = weakref.ref(holder)
    except TypeError:
        return Source("item", attributes, name, path) if slot is None else Source("slot", holder, slot, path)
    return Source("weak", kept, name, path) if slot is None else Source("slot", kept, slot, path)


def default_of(variable: contextvars.ContextVar[Any]) -> Any:
    """What a context variable gives where none was set, or ``MISSING``. Only an empty context tells: ``get`` of a
    variable that was set does not, and ``get(MISSING)`` takes that in its place."""
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return MISSING


def lasting(holder: Any) -> Callable[[], Any]:
    """Gives what has a gradient, or another attribute. A parameter is kept, as guards of its recording keep it, too:
    torch swaps no tensor that has a weak reference."""
    return (lambda: holder) if isinstance(holder, torch.nn.Parameter) else weakref.ref(holder)


def reference_to(tensor: torch.Tensor, sources: Sequence[Source]) -> Reference:
    """Gives a tensor without keeping it alive. One that a module has is looked up in the module: torch swaps no tensor
    that has a weak reference (``torch.utils.swap_tensors``, and ``Module.to`` where that is asked to swap). What is but
    a gradient is the one that its tensor has by then: each step makes another one."""
    if (gradient := only_gradient(sources)) is not None:
        above = [] if gradient.parent is None else [gradient.parent]
        return functools.partial(_gradient_of, reference_to(gradient.holder, above))
    for source in sources:
        module = source.parent.get() if source.kind in ("parameter", "buffer") and source.parent is not None else None
        if isinstance(module, torch.nn.Module):
            return functools.partial(_member_of, weakref.ref(module), f"_{source.kind}s", source.name)
    return weakref.ref(tensor)


def only_gradient(sources: Sequence[Source]) -> Source | None:
    """The first source, if a value is kept as the gradient of tensors and nowhere else."""
    are_gradients = all(
        source.kind == "attribute" and source.name == "grad" and issubclass(type(source.holder), torch.Tensor)
        for source in sources
    )
    return sources[0] if sources and are_gradients else None


def _gradient_of(reference: Reference) -> torch.Tensor | None:
    tensor = reference()
    return tensor.grad if tensor is not None and tensor.is_leaf else None


def whose_gradient(reference: Reference) -> torch.Tensor | None:
    """The tensor, where the reference gives its gradient."""
    if not isinstance(reference, functools.partial) or reference.func is not _gradient_of:
        return None
    found: torch.Tensor | None = reference.args[0]()
    return found


def _member_of(reference: weakref.ref[torch.nn.Module], table: str, name: str) -> torch.Tensor | None:
    module = reference()
    found: torch.Tensor | None = None if module is None else getattr(module, table).get(name)
    return found


Reference = Callable[[], torch.Tensor | None]
"""Gives a tensor, as long as it is there."""
Found = tuple[Source, Any]
"""A source and what it holds."""
Table = tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]
"""A dict, and the keys and the very objects it held."""
Tables = tuple[Table, ...]


are_as_they_were: Callable[[Tables], bool] = native.are_as_they_were
"""Whether a dict has the same members in the same order."""

members_of_module: Callable[[torch.nn.Module, Source], tuple[list[Found], Tables]] = functools.partial(
    native.members_of_module, internals=MODULE_INTERNALS
)
"""Members with their places, parameters first, and the dicts behind the module."""
