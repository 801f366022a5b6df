"""``frozen`` and ``define`` of attrs with one ``__repr__`` that all classes share.

attrs writes and compiles the methods of each class while the class is made. The library has about 300 classes, most of
which nobody ever prints: the ``__repr__`` of each took a sixth of what loading the library takes. This one looks at the
fields when it is called. ``mypy`` knows the two as attrs' own by ``scripts/mypy_attrs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, dataclass_transform

import attrs


@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field,))
def frozen(cls: type | None = None, **options: Any) -> Any:
    """Make a class of data that never changes, with slots. Options are those of ``attrs.frozen``."""
    return _made(attrs.frozen, cls, options)


@dataclass_transform(field_specifiers=(attrs.field,))
def define(cls: type | None = None, **options: Any) -> Any:
    """Make a class of data, with slots. Options are those of ``attrs.define``."""
    return _made(attrs.define, cls, options)


def _made(maker: Callable[..., Any], cls: Any, options: dict[str, Any]) -> Any:
    if cls is None:
        return lambda cls: _made(maker, cls, options)
    if "repr" not in options and "__repr__" not in vars(cls):
        cls.__repr__ = _repr
    return maker(cls, **{"repr": False, **options})


def _repr(self: Any) -> str:
    shown = (field for field in attrs.fields(type(self)) if field.repr)
    values = (f"{field.name}={getattr(self, field.name)!r}" for field in shown)
    return f"{type(self).__qualname__.rpartition('>.')[2]}({', '.join(values)})"
