"""Attribute reads: which attributes a body reads, wherever its code is: ``self.p`` in ``Dropout.forward``.

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

from capture._containers import PLAIN_TYPES
from capture._places import MODULE_INTERNALS
from capture._state import Snapshot, closed_package
from capture._torch_private import is_registered_container
from capture._torch_private_dynamo import around_compiling, is_loaded

Read = tuple[Any, str]
"""A module or an object, and the attribute's name."""
_NO_OBJECTS = (
    torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
    types.ModuleType, functools.partial, tuple, list, dict, set, frozenset,
)  # fmt: skip
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of classes: made by a ``class`` statement, and not to be changed
_LEFT_OUT = MODULE_INTERNALS | {"training", "forward", "__dict__", "__class__"}
_STEPS_ASIDE = ("torch.nn.parallel", "torch.distributed")
"""Whose modules count their steps in attributes, and have switches of their own (``_bind``)."""
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


class _Stand:
    """Stands for the ``__getattribute__`` of a class. No function, which compilers take for the user's."""

    def __init__(self, reader: _Reader, kind: type) -> None:
        self._notes, self._reader, self._kind = reader.notes, reader, kind
        self.own = kind.__dict__.get("__getattribute__")

    def __get__(self, holder: Any, kind: Any = None) -> Any:
        return self if holder is None else functools.partial(self, holder)

    def __call__(self, holder: Any, name: str) -> Any:
        if name not in _LEFT_OUT:
            read = self._notes.get(threading.get_ident())
            if read is not None:
                read[id(holder), name] = None
                self._reader.look_for_compiler()
        if self.own is not None:
            return self.own(holder, name)
        if self._kind is torch.nn.Module:
            return object.__getattribute__(holder, name)  # in half the time
        return super(self._kind, holder).__getattribute__(name)  # type: ignore[arg-type]


class _Reader:
    """Notes reads of threads, by classes that stand-ins were put on. They step aside while Dynamo compiles, which would
    compile them, too."""

    def __init__(self) -> None:
        self.notes: dict[int, dict[tuple[int, str], None]] = {}
        self._kinds: dict[int, frozenset[type]] = {}
        """By thread, the classes it wants to know of."""
        self._stands: dict[type, _Stand] = {}
        self._lock = threading.RLock()
        self._remove: Callable[[], None] | None = None
        self._is_told = self._is_aside = False

    def begin(self, kinds: Iterable[type]) -> bool:
        """Read in this thread from now on. False where something around this does already."""
        thread = threading.get_ident()
        with self._lock:
            if thread in self.notes:
                return False
            self.notes[thread], self._kinds[thread] = {}, frozenset(kinds)
            self.look_for_compiler()
            self._arrange()
        return True

    def end(self) -> dict[tuple[int, str], None]:
        """Read no more: by ``id`` of the holder, what was read."""
        thread = threading.get_ident()
        with self._lock:
            del self._kinds[thread]
            found = self.notes.pop(thread)
            if not self.notes and self._remove is not None:
                self._remove()
            if not self.notes:
                self._remove, self._is_told, self._is_aside = None, False, False
            self._arrange()
        return found

    def look_for_compiler(self) -> None:
        """It may be loaded by now."""
        if not self._is_told and is_loaded():
            self._is_told = True
            self._remove = around_compiling(self._step_aside, self._come_back)
            if self._remove is None:
                self._step_aside()

    def _step_aside(self, _: object = None) -> None:
        self._is_aside = True
        self._arrange()

    def _come_back(self, _: object) -> None:
        self._is_aside = False
        self._arrange()

    def _arrange(self) -> None:
        with self._lock:
            wanted = frozenset[type]() if self._is_aside else frozenset[type]().union(*self._kinds.values())
            for kind in [kind for kind in self._stands if kind not in wanted]:
                own = self._stands.pop(kind).own
                if own is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = own  # type: ignore[method-assign]
            for kind in wanted - self._stands.keys():
                stand = _Stand(self, kind)
                with contextlib.suppress(AttributeError, TypeError):  # a metaclass may let nobody change its classes
                    kind.__getattribute__ = stand  # type: ignore[method-assign, assignment]
                    self._stands[kind] = stand


_reader = _Reader()


@contextlib.contextmanager
def attribute_reads(before: Snapshot) -> Iterator[list[Read]]:
    """The attributes that code in this thread reads in the block, in order, once the block is over."""
    found: list[Read] = []
    modules, objects = before.modules, [one for one, _ in near_objects(before)]
    kinds = [type(one) for one in objects] + ([torch.nn.Module] if modules else [])
    if not kinds or not _reader.begin(kinds):
        yield found
        return
    read: dict[tuple[int, str], None] = {}
    try:
        yield found
    finally:
        read = _reader.end()
    holders = [one for one in modules if not type(one).__module__.startswith(_STEPS_ASIDE)]
    known = {id(one): one for one in (*holders, *objects)}
    found += [(known[key], name) for key, name in read if key in known and _is_own(known[key], name)]


def near_objects(before: Snapshot) -> list[tuple[Any, str]]:
    """Objects of users' classes that the body is bound to, or names, with their paths: the key tells which they are."""
    starts = itertools.takewhile(lambda one: one[0].parent is None, before.entered)
    near = [(value, place) for place, value in starts if place.kind in ("closure", "global") or place.path == "self"]
    return [(value, place.path) for value, place in near if _is_users(value)]


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
