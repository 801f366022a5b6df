"""Attribute reads: which attributes of modules a body reads, wherever its code is: ``self.p`` in ``Dropout.forward``.

Tensors and submodules have checks of their own. Plain values that a body read are looked at before every replay.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from capture._containers import PLAIN_TYPES
from capture._places import MODULE_INTERNALS
from capture._torch_private_dynamo import around_compiling, is_loaded

Read = tuple[torch.nn.Module, str]
_LEFT_OUT = MODULE_INTERNALS | {"training", "forward", "__dict__", "__class__"}
_STEPS_ASIDE = ("torch.nn.parallel", "torch.distributed")
"""Whose modules count their steps in attributes, and have switches of their own (``_bind``)."""
_FIXED = (types.FunctionType, types.BuiltinFunctionType, type)
_SMALL = 16  # members of a dict or list that are compared


class Reads:
    """The attributes that bodies read so far, without keeping the modules alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.nn.Module], dict[str, None]]] = {}
        """By ``id`` of the module: users' modules may compare as they like."""

    def note(self, read: Iterable[Read]) -> None:
        """These were read."""
        for module, name in read:
            known = self._names.get(id(module))
            if known is None or known[0]() is not module:
                known = self._names[id(module)] = weakref.ref(module), {}
            known[1][name] = None

    def of(self, module: torch.nn.Module) -> tuple[list[str], list[tuple[str, Any]]]:
        """Names that a module has not, and those of plain values that it has, with these."""
        known, own = self._names.get(id(module)), module.__dict__
        names = known[1] if known is not None and known[0]() is module else {}
        absent = [name for name in names if name not in own]
        return absent, [(name, own[name]) for name in names if name in own and is_plain(own[name])]


class _Reader:
    """Stands for ``Module.__getattribute__`` while any thread's reads are noted, and steps aside while Dynamo compiles,
    which would compile this, too."""

    def __init__(self) -> None:
        self._notes: dict[int, dict[tuple[int, str], None]] = {}
        self._lock = threading.Lock()
        self._remove: Callable[[], None] | None = None
        self._is_told = False

    def __get__(self, module: Any, kind: Any = None) -> Any:
        return self if module is None else functools.partial(self, module)

    def __call__(self, module: Any, name: str) -> Any:
        if name not in _LEFT_OUT:
            read = self._notes.get(threading.get_ident())
            if read is not None:
                read[id(module), name] = None
                if not self._is_told and is_loaded():
                    self._follow_compiler()
        return object.__getattribute__(module, name)

    def begin(self) -> bool:
        """Read in this thread from now on. False where something around this does already."""
        thread = threading.get_ident()
        with self._lock:
            if thread in self._notes or (not self._notes and "__getattribute__" in torch.nn.Module.__dict__):
                return False
            self._notes[thread] = {}
            if len(self._notes) == 1:
                self._is_told = is_loaded()
                if self._is_told:
                    self._follow_compiler()
                else:
                    self._stand()
        return True

    def end(self) -> dict[tuple[int, str], None]:
        """Read no more: by ``id`` of the module, what was read."""
        with self._lock:
            found = self._notes.pop(threading.get_ident())
            if not self._notes:
                self._step_aside()
                if self._remove is not None:
                    self._remove()
                self._remove = None
        return found

    def _follow_compiler(self) -> None:
        self._is_told = True
        self._remove = around_compiling(self._step_aside, self._stand)
        if self._remove is None:
            self._step_aside()
        else:
            self._stand()

    def _stand(self) -> None:
        if self._notes:
            torch.nn.Module.__getattribute__ = self  # type: ignore[method-assign]

    def _step_aside(self) -> None:
        if torch.nn.Module.__dict__.get("__getattribute__") is self:
            del torch.nn.Module.__getattribute__


_reader = _Reader()


@contextmanager
def attribute_reads(modules: Sequence[torch.nn.Module]) -> Iterator[list[Read]]:
    """The attributes that code in this thread reads in the block, in order, once the block is over."""
    found: list[Read] = []
    if not modules or not _reader.begin():
        yield found
        return
    read: dict[tuple[int, str], None] = {}
    try:
        yield found
    finally:
        read = _reader.end()
    known = {id(one): one for one in modules if not type(one).__module__.startswith(_STEPS_ASIDE)}
    found += [(known[key], name) for key, name in read if key in known and _is_own(known[key], name)]


def _is_own(module: torch.nn.Module, name: str) -> bool:
    """It is in the module's ``__dict__``, or nowhere: a method or a property is of its class."""
    if name in module.__dict__ or name.startswith("__"):
        return name in module.__dict__
    there = (module._parameters, module._buffers, module._modules)
    return not any(name in table for table in there) and not hasattr(type(module), name)


def is_plain(value: Any) -> bool:
    """A value, a function, or a small list or dict of values. Other objects are the business of other checks."""
    if type(value) in PLAIN_TYPES or isinstance(value, _FIXED):
        return True
    if type(value) is dict:
        return len(value) <= _SMALL and all(type(one) in PLAIN_TYPES for one in (*value, *value.values()))
    return type(value) in (list, tuple) and len(value) <= _SMALL and all(type(one) in PLAIN_TYPES for one in value)
