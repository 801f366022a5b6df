"""Which attributes a body reads, wherever its code is: ``self.p`` in ``Dropout.forward``.

Of modules, and of objects that the body is bound to or names. Tensors and submodules have checks of their own. Plain
values that a body read are looked at before every replay.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from capture.core import forks
from capture.key.pytree import PLAIN_TYPES
from capture.state.snapshot import Snapshot, closed_package
from capture.state.source import MODULE_INTERNALS
from capture.torch_private.capabilities import is_registered_container
from capture.torch_private.dynamo import around_compiling, is_loaded

Read = tuple[Any, str]
"""A module or an object, and the attribute's name."""
_NO_OBJECTS = (
    torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    types.ModuleType, functools.partial, tuple, list, dict, set, frozenset,
)  # fmt: skip
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of classes: made by a ``class`` statement, and not to be changed
_LEFT_OUT = MODULE_INTERNALS | {"training", "forward", "__dict__", "__class__"}
_STEPS_ASIDE = ("torch.nn.parallel", "torch.distributed")
"""Whose modules count their steps in attributes, and have switches of their own (``key.signature``)."""
_FIXED = (types.FunctionType, types.BuiltinFunctionType, type)
_SMALL = 16  # members of a dict or list that are compared


class Reads:
    """The attributes that bodies read so far, without keeping anything alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Any], dict[str, None]]] = {}
        """By ``id`` of the holder: users' classes may compare as they like."""

    def note(self, read: Iterable[Read]) -> None:
        """These were read."""
        for holder, name in read:
            known = self._names.get(id(holder))
            if known is None or known[0]() is not holder:
                known = self._names[id(holder)] = weakref.ref(holder), {}
            known[1][name] = None

    def of(self, holder: Any) -> tuple[list[str], list[tuple[str, Any]]]:
        """Names that it has not, and those of plain values that it has, with these."""
        known, own = self._names.get(id(holder)), holder.__dict__
        names = known[1] if known is not None and known[0]() is holder else {}
        absent = [name for name in names if name not in own]
        return absent, [(name, own[name]) for name in names if name in own and is_plain(own[name])]


class _NotingGetattribute:
    """Stands for the ``__getattribute__`` of a class. No function, which compilers take for the user's."""

    def __init__(self, reader: _ReadNotes, kind: type) -> None:
        self._reads, self._read_notes, self._kind = reader.trace, reader, kind
        self.own = kind.__dict__.get("__getattribute__")

    def __get__(self, holder: Any, kind: Any = None) -> Any:
        return self if holder is None else functools.partial(self, holder)

    def __call__(self, holder: Any, name: str) -> Any:
        if name not in _LEFT_OUT:
            read = self._reads.get(threading.get_ident())
            if read is not None:
                read[id(holder), name] = None
                self._read_notes.look_for_compiler()
        if self.own is not None:
            return self.own(holder, name)
        if self._kind is torch.nn.Module:
            return object.__getattribute__(holder, name)  # in half the time
        return super(self._kind, holder).__getattribute__(name)  # type: ignore[arg-type]


class _ReadNotes:
    """Notes reads of threads, by replacing ``__getattribute__`` of their classes. The replacements are taken off
    while Dynamo compiles, which would compile them, too."""

    def __init__(self) -> None:
        self.trace: dict[int, dict[tuple[int, str], None]] = {}
        self._kinds: dict[int, frozenset[type]] = {}
        """By thread, the classes it wants to know of."""
        self._installed: dict[type, _NotingGetattribute] = {}
        self._lock = threading.RLock()
        self._remove: Callable[[], None] | None = None
        self._is_told = self._is_suspended = False

    def begin(self, kinds: Iterable[type]) -> bool:
        """Read in this thread from now on. False where something around this does already."""
        thread = threading.get_ident()
        with self._lock:
            if thread in self.trace:
                return False
            self.trace[thread], self._kinds[thread] = {}, frozenset(kinds)
            self.look_for_compiler()
            self._install_wanted()
        return True

    def end(self) -> dict[tuple[int, str], None]:
        """Read no more: by ``id`` of the holder, what was read."""
        thread = threading.get_ident()
        with self._lock:
            self._kinds.pop(thread, None)
            found = self.trace.pop(thread, {})
            if not self.trace and self._remove is not None:
                self._remove()
            if not self.trace:
                self._remove, self._is_told, self._is_suspended = None, False, False
            self._install_wanted()
        return found

    def forget_all(self) -> None:
        """In the child of a fork: whoever reads is in the parent."""
        forks.free(self._lock)
        for thread in (*self.trace, *self._kinds):
            self._kinds.pop(thread, None)
            self.trace.pop(thread, None)
        self.end()

    def look_for_compiler(self) -> None:
        """It may be loaded by now."""
        if not self._is_told and is_loaded():
            self._is_told = True
            self._remove = around_compiling(self._suspend, self._resume)
            if self._remove is None:
                self._suspend()

    def _suspend(self, _: object = None) -> None:
        self._is_suspended = True
        self._install_wanted()

    def _resume(self, _: object) -> None:
        self._is_suspended = False
        self._install_wanted()

    def _install_wanted(self) -> None:
        with self._lock:
            wanted = frozenset[type]() if self._is_suspended else frozenset[type]().union(*self._kinds.values())
            for kind in [kind for kind in self._installed if kind not in wanted]:
                own = self._installed[kind].own
                if own is not None:
                    kind.__getattribute__ = own  # type: ignore[method-assign]
                elif isinstance(kind.__dict__.get("__getattribute__"), _NotingGetattribute):
                    del kind.__getattribute__
                del self._installed[kind]
            for kind in wanted - self._installed.keys():
                noting = self._installed[kind] = _NotingGetattribute(self, kind)
                try:
                    kind.__getattribute__ = noting  # type: ignore[method-assign, assignment]
                except (AttributeError, TypeError):  # a metaclass may let nobody change its classes
                    del self._installed[kind]


_read_notes = _ReadNotes()
forks.in_child(_read_notes.forget_all)


@contextlib.contextmanager
def attribute_reads(before: Snapshot) -> Iterator[list[Read]]:
    """The attributes that code in this thread reads in the block, in order, once the block is over."""
    found: list[Read] = []
    modules, objects = before.modules, [one for one, _ in near_objects(before)]
    kinds = [type(one) for one in objects] + ([torch.nn.Module] if modules else [])
    if not kinds or not _read_notes.begin(kinds):
        yield found
        return
    read: dict[tuple[int, str], None] = {}
    try:
        yield found
    finally:
        read = _read_notes.end()
    holders = [one for one in modules if not type(one).__module__.startswith(_STEPS_ASIDE)]
    known = {id(one): one for one in (*holders, *objects)}
    found += [(known[key], name) for key, name in read if key in known and _is_own(known[key], name)]


def near_objects(before: Snapshot) -> list[tuple[Any, str]]:
    """Objects of users' classes that the body is bound to, or names, with their paths: the key tells which they are."""
    starts = itertools.takewhile(lambda one: one[0].parent is None, before.entered)
    near = [
        (value, source) for source, value in starts if source.kind in ("closure", "global") or source.path == "self"
    ]
    return [(value, source.path) for value, source in near if _is_users(value)]


def _is_users(value: Any) -> bool:
    kind = type(value)
    others = isinstance(value, _NO_OBJECTS) or closed_package(kind.__module__) or is_registered_container(kind)
    if others or kind.__module__.startswith("torch.") or kind.__flags__ & (_HEAP | _IMMUTABLE) != _HEAP:
        return False
    return kind.__weakrefoffset__ != 0 and type(getattr(value, "__dict__", None)) is dict


def _is_own(holder: Any, name: str) -> bool:
    """It is in the ``__dict__``, or nowhere: a method or a property is of the class."""
    if name in holder.__dict__ or name.startswith("__"):
        return name in holder.__dict__
    is_module = isinstance(holder, torch.nn.Module)
    tables = (holder._parameters, holder._buffers, holder._modules) if is_module else ()
    return not any(name in table for table in tables) and not hasattr(type(holder), name)


def is_plain(value: Any) -> bool:
    """A value, a function, or a small list or dict of values. Other objects are the business of other checks."""
    if type(value) in PLAIN_TYPES or isinstance(value, _FIXED):
        return True
    if type(value) is dict:
        return len(value) <= _SMALL and all(type(one) in PLAIN_TYPES for one in (*value, *value.values()))
    return type(value) in (list, tuple) and len(value) <= _SMALL and all(type(one) in PLAIN_TYPES for one in value)
