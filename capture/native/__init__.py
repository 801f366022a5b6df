"""The C module: the fast path through a call, guards, liveness of outputs, launches, tapes. The library needs it.

Wheels carry it; an installation from sources builds it. Python asks C for nothing that it cannot look up here, and what
C asks of Python is in ``native.h``. ``_VERSION`` changes with either, so that a module of other sources is not used.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, TypeVar

from capture.native.dict_watchers import trust

MISS: Any = object()
"""Returned by a fast path for a call that it does not fit: the general way has to be taken."""
_VERSION = 54
MOST_VALUES = 512  # values in one call that a fast path takes (``native.h``)
MOST_PATHS = 32  # paths of one function that C tries in turn (``fast_paths.c``)
_BUILD = "`pip install --no-build-isolation --force-reinstall --no-deps torch-capture`"


def _load() -> Any:
    if "t" in sys.abiflags:
        raise ImportError(
            "torch-capture does not support free-threaded builds of Python: its C module relies on the GIL. "
            f"Use the ordinary build of the same version ({sys.executable} is a free-threaded one)"
        )
    try:
        module: Any = importlib.import_module("capture.native._native")
    except ImportError as error:
        raise ImportError(
            "torch-capture is here without its C module: install a wheel, or have a C compiler (cc or gcc) and the "
            f"headers of Python build it with {_BUILD} (`-e .` in a checkout) [{error}]"
        ) from error
    if getattr(module, "VERSION", 0) != _VERSION:
        raise ImportError(
            f"the C module of torch-capture was built from other sources: build it again with {_BUILD} "
            "(`-e .` in a checkout)"
        )
    return module


native: Any = _load()
DICT_WATCHERS = trust(native) if sys.version_info >= (3, 12) else (False, False)
"""See `dict_watchers.trust`. Up to Python 3.11 dicts have versions of their own."""
Kind = TypeVar("Kind", bound=type)


def seen(kind: Kind) -> Kind:
    """The C module reads attributes of this class where its objects keep them (``native.h`` names them): it has
    ``__slots__``."""
    native.tell(kind)
    return kind
