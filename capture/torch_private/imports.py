"""Modules of torch that a watched body imports: they must see torch as it is.

torch's compiler makes tables of torch's functions as it is imported, compares signatures with its own, and raises at
what stands in for a function. A body imports it with its first optimizer, for example. To import it before each first
watched run would be simple, and would take longer than ``import torch``. So the import system tells of such imports.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, Protocol

_TORCH = "torch."


class Listener(Protocol):
    """Who is told of imports, by whatever thread."""

    def begin(self) -> None:
        """A module of torch is about to run."""

    def end(self) -> None:
        """It has run, or raised."""


listeners: list[Listener] = []


class _Finder:
    """Finds nothing of its own: it has the loader that another one found tell when it runs a module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> Any:
        """What the finders after this one find."""
        if not name.startswith(_TORCH):
            return None
        finders = sys.meta_path[sys.meta_path.index(_Finder) + 1 :]
        for find in [getattr(finder, "find_spec", None) for finder in finders]:
            if find is not None and (spec := find(name, path, target)) is not None:
                _tell_of(spec)
                return spec
        return None


def _tell_of(spec: ModuleSpec) -> None:
    """Have the loader tell of the next module that it runs. It stays the loader that it is: modules and users look at
    it. One that takes no attribute, as it is a class or has slots, tells nothing."""
    loader: Any = spec.loader
    own: Any = getattr(loader, "__dict__", None)
    if type(own) is dict and "exec_module" not in own and hasattr(loader, "exec_module"):
        own["exec_module"] = functools.partial(_run, own, loader.exec_module)


def _run(own: dict[str, Any], original: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    own.pop("exec_module", None)
    told = list[Listener]()
    try:
        for listener in tuple(listeners):
            told.append(listener)
            listener.begin()
        original(module)
    finally:
        for listener in told:
            listener.end()


def tell() -> None:
    """Have imports told, from now on and for good: another thread may go through the list of finders at any time, and
    would leave one out if the list got shorter."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
