"""Whether code or a class is a library's or the user's."""

from __future__ import annotations

import abc
import sys
import types
from typing import Any

from capture.key.attributes import HEAP, PROXIES, dict_of

_LIBRARY = sys.stdlib_module_names | {"torch", "attr", "attrs", "numpy", "typing_extensions"}
"""Packages that run on behalf of their caller: of ours, or of the user's."""
_INSTALLED = ("site-packages", "dist-packages")


def users_modules() -> set[str]:
    """Names of the modules of this process that belong to no library and are not installed."""
    return {
        name for name, one in list(sys.modules.items())
        if not is_library(package_of(name)) and package_of(name) != "capture" and not is_installed(one)
    }  # fmt: skip


def is_installed(module: Any) -> bool:
    """Whether a module lies where packages are installed. Some have no file there, but a folder."""
    members = getattr(module, "__dict__", {})
    places = members.get("__file__"), members.get("__path__")
    return any(part in str(place) for place in places if place is not None for part in _INSTALLED)


def package_of(module: Any) -> str:
    """The first part of a module's name; empty where the name is no text."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def name_of(module: Any) -> str:
    """The name that a module has, which users may take away; empty where it is no text."""
    name = (dict_of(module) or {}).get("__name__")
    return name if type(name) is str else ""


def module_of(kind: type) -> Any:
    """The name of the module that a class is of. One that ``type(...)`` makes from a class with abstract methods has
    the name of ``abc``, where its metaclass is written, and is of none."""
    module = type.__getattribute__(kind, "__module__")
    return "" if module == "abc" and vars(abc).get(kind.__name__) is not kind else module


def package_behind(value: Any) -> str:
    """The package of a module, a class or a function; of another object, that of its class."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return package_of(name_of(value))
    if issubclass(kind, type):
        return package_of(module_of(value))
    if kind.__flags__ & HEAP or kind in PROXIES:
        return package_of(module_of(kind))
    return package_of(getattr(value, "__module__", None))


def is_library(package: str) -> bool:
    """Whether the package is torch's, or one that comes with Python: its code reads what it made itself."""
    return package in _LIBRARY or not package
