"""Settings that packages keep in C or by thread, which a body's code reads without naming them, or by a function that
gives them.

A getter of the standard library is known by its name and by giving a plain value to who asks without arguments. What
no getter of C code tells is in a table: settings of a package, asked by its own public function.
"""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from capture.core.data import frozen
from capture.core.interrupts import let_through
from capture.guards.names_used import Names
from capture.key.attributes import MISSING
from capture.key.packages import is_library, package_of
from capture.key.pytree import PLAIN_TYPES

_GETTER = re.compile(r"_?(get|is)_?[a-z]\w*")
Asked = tuple[str, Callable[[], object], object]
"""A path for messages, a function that reads the setting, and the value that it gives now."""


@frozen
class _Settings:
    """A package whose functions follow settings that were made earlier."""

    path: str
    package: str
    read: Callable[[], object]
    names: Collection[str] = ()
    """The settings are read if users' code mentions one of these names; empty: if it uses the package at all."""
    has_objects: bool = False
    """Operations of the package's objects follow the settings, too."""


def _of_decimal() -> object:
    context = sys.modules["decimal"].getcontext()
    traps = tuple([bool(context.traps[trap]) for trap in context.traps])
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, traps


def _flags_of_decimal() -> object:
    flags = sys.modules["decimal"].getcontext().flags
    return tuple([bool(flags[flag]) for flag in flags])


def _of_numpy() -> object:
    numpy = sys.modules["numpy"]
    return tuple(numpy.geterr().values()), repr(numpy.get_printoptions())


def _state_of_numpy() -> object:
    _, keys, *rest = sys.modules["numpy"].random.get_state()
    return keys.tobytes(), *rest


def _locale() -> object:
    locale = sys.modules["locale"]
    return locale.setlocale(locale.LC_ALL)


_TABLE = (
    _Settings("decimal.getcontext()", "decimal", _of_decimal, has_objects=True),
    _Settings("decimal.getcontext().flags", "decimal", _flags_of_decimal, {"flags"}),
    _Settings("numpy.geterr()", "numpy", _of_numpy, has_objects=True),
    _Settings("numpy.random.get_state()", "numpy", _state_of_numpy, {"get_state"}),
    _Settings("random.getstate()", "random", lambda: sys.modules["random"].getstate(), {"getstate"}),
    _Settings("locale.setlocale(locale.LC_ALL)", "locale", _locale),
    _Settings("torch.initial_seed()", "torch", lambda: torch.initial_seed(), {"initial_seed"}),
    _Settings("warnings.filters", "warnings", lambda: tuple(warnings.filters), {"warn", "warn_explicit"}),
)


def asked_of_packages(
    names: Names, kinds: Iterable[type], functions: Iterable[Any], in_cells: Collection[str]
) -> Iterator[Asked]:
    """Settings that code which mentions ``names`` can have depended on. ``kinds``: classes of the objects that it
    reaches; ``functions``: functions in C that it reaches; ``in_cells``: packages whose modules closure cells hold."""
    mentioned = names.of_packages(())
    for function in functions:
        yield from _asked(function)
    packages = _packages_named(names).union(in_cells)
    of_objects = {package_of(kind.__module__) for kind in kinds}
    for setting in _TABLE:
        is_used = setting.package in packages or (setting.has_objects and setting.package in of_objects)
        if (
            is_used
            and setting.package in sys.modules
            and (not setting.names or not mentioned.isdisjoint(setting.names))
        ):
            try:
                value = setting.read()
            except Exception as error:  # noqa: BLE001 - a module that is only being imported, or another one of that name
                let_through(error)
                continue
            yield setting.path, setting.read, value


def is_getter(function: Any) -> bool:
    """Whether it is a function in C of the standard library that may give a setting, such as
    ``sys.getrecursionlimit``."""
    module = getattr(function.__self__, "__name__", None) or function.__module__
    return _GETTER.fullmatch(function.__name__) is not None and package_of(module) in sys.stdlib_module_names


def value_given_by(function: Any) -> Any:
    """What a getter gives: a plain value, a tuple of such, or an object that it gives each time. Else MISSING."""
    try:
        value, again = function(), function()
    except Exception as error:  # noqa: BLE001 - it needs arguments, so it is no getter
        let_through(error)
        return MISSING
    is_plain = all(type(one) in PLAIN_TYPES for one in (value if type(value) is tuple else (value,)))
    return value if is_plain or (value is again and type(value) is not types.FrameType) else MISSING


def _asked(function: Any) -> Iterator[Asked]:
    value = value_given_by(function)
    if value is not MISSING:
        yield f"{function.__module__}.{function.__name__}()", function, value


def _packages_named(names: Names) -> set[str]:
    """Packages that users' code names in its globals, or imports itself."""
    packages = {package_of(name) for name in names.of_packages(()) if name in sys.modules}
    for scope, mentioned in names.scopes.values():
        if is_library(package_of(scope.get("__name__"))):
            continue
        for name in mentioned:
            value = scope.get(name)
            if issubclass(type(value), types.ModuleType):
                packages.add(package_of(getattr(value, "__name__", None)))
            elif issubclass(type(value), (types.FunctionType, type)):
                packages.add(package_of(getattr(value, "__module__", None)))
    return packages
