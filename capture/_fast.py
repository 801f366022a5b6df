"""Fast: the C module that takes the straight way through a call, where it was built.

It is part of the package and built when that is installed, if there is a C compiler. Without it, or with
``CAPTURE_NATIVE=0``, the same steps run in Python (2 to 3 times as long, ``benchmarks/``).
"""

from __future__ import annotations

import importlib
import os
from typing import Any, TypeVar

MISS: Any = object()
"""The long way has to be taken."""
_VERSION = 19
MOST_VALUES = 512  # of one call that the C module takes (``native.h``)


def _load() -> Any:
    if os.environ.get("CAPTURE_NATIVE", "1").strip().lower() in ("", "0", "false", "no", "off"):
        return None
    try:
        found: Any = importlib.import_module("capture._native")
    except ImportError:
        return None
    return found if getattr(found, "VERSION", 0) == _VERSION else None  # else built from other sources


native: Any = _load()
"""The module, or None."""
Kind = TypeVar("Kind", bound=type)


def seen(kind: Kind) -> Kind:
    """The C module reads attributes of this class where its objects keep them (``native.h`` names them): it has
    ``__slots__``."""
    if native is not None:
        native.tell(kind)
    return kind


def no_way(*_: Any) -> Any:
    """There is none."""
    return MISS
