"""What classes, modules and functions hold by name; users' code sets names there.

A namespace is noted as a whole, with the very objects in it, so that a name that is set, replaced or deleted is seen
even if no known code mentions it.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from capture.core.data import frozen
from capture.key.attributes import HEAP
from capture.key.code_names import MISSING
from capture.key.packages import is_library, package_of
from capture.state.source import Source, SourceKind
from capture.torch_private.dynamo import installed_by_compiler

_OWN = ("capture", "pytest", "_pytest", "builtins", "__builtin__")
_NOT_WRITTEN = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod,
                property, types.MemberDescriptorType, types.GetSetDescriptorType,
                types.WrapperDescriptorType)  # fmt: skip
"""Types of values that a walk does not go on from: nothing is written into them, or they are reached in another way."""


@frozen(eq=False)
class Namespace:
    """Names and what they held. ``holder``: a class, a function or a tensor, or the dict itself."""

    kind: SourceKind
    holder: Any
    prefix: str
    parent: Source | None
    mapping: Mapping[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    def place(self, name: str) -> Source:
        """The place of one name."""
        return Source(self.kind, self.holder, name, f"{self.prefix}{name}", self.parent)

    def members(self) -> Iterator[tuple[Source, Any]]:
        """Names and values that a walk goes on from."""
        for name, value in zip(self.names, self.values, strict=True):
            if counts(name) and holds_state(value):
                yield self.place(name), value

    def changes(self) -> Iterator[tuple[Source, Any, Any]]:
        """Places whose values changed, with the former and the present value."""
        now = self.mapping
        if len(now) == len(self.names) and all(map(operator.is_, now.values(), self.values)):
            return
        before = dict(zip(self.names, self.values, strict=True))
        for name in {**before, **now}:
            old, new = before.get(name, MISSING), now.get(name, MISSING)
            if old is not new and counts(name) and not (old is MISSING and installed_by_compiler(now, name)):
                yield self.place(name), old, new


def counts(name: Any) -> bool:
    """Whether a name is set by users' code: it is none of Python's own, and none that Dynamo puts on tensors."""
    return (
        not str(name).startswith("_dynamo_")
        and type(name) is str
        and not (name.startswith("__") and name.endswith("__"))
        and name != "_abc_impl"
    )


def holds_state(value: Any) -> bool:
    """Whether a body may change the value, or other values are kept in it."""
    return not issubclass(type(value), _NOT_WRITTEN)


def is_of_users(module: Any) -> bool:
    """Whether it is a module, or a class or function of a module, that is neither a library's nor ours."""
    package = package_of(module)
    return not is_library(package) and package not in _OWN


def users_classes(kind: type) -> list[type]:
    """The class and its bases, as far as users wrote them."""
    return [one for one in kind.__mro__ if one.__flags__ & HEAP and is_of_users(one.__module__)]


def scope_of(module: Any) -> dict[str, Any] | None:
    """The globals of a user's module."""
    found = sys.modules.get(module) if isinstance(module, str) and is_of_users(module) else None
    return found.__dict__ if type(found) is types.ModuleType else None
