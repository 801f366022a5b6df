"""Whether code or a class is a library's or the user's."""

from __future__ import annotations

import abc
import sys
from typing import Any

_LIBRARY = sys.stdlib_module_names | {"torch", "attr", "attrs", "numpy", "typing_extensions"}
"""Packages that run on behalf of their caller: of ours, or of the user's."""
_INSTALLED = ("site-packages", "dist-packages")


def users_modules() -> set[str]:
    """Names of the modules of this process that belong to no library and are not installed."""
    return {
        name for name, one in list(sys.modules.items())
        if not is_library(package_of(name)) and package_of(name) != "capture"
        and not any(part in str(getattr(one, "__dict__", {}).get("__file__")) for part in _INSTALLED)
    }  # fmt: skip


def package_of(module: Any) -> str:
    """The first part of a module's name; empty where the name is no text."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def module_of(kind: type) -> Any:
    """The name of the module that a class is of. One that ``type(...)`` makes from a class with abstract methods has
    the name of ``abc``, where its metaclass is written, and is of none."""
    module = kind.__module__
    return "" if module == "abc" and vars(abc).get(kind.__name__) is not kind else module


def is_library(package: str) -> bool:
    """Whether the package is torch's, or one that comes with Python: its code reads what it made itself."""
    return package in _LIBRARY or not package
