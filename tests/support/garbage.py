"""Keep old objects out of garbage collections: a process with torch has a million objects, and a full collection takes
half a second.

``conftest.py`` sets aside all objects from before the first test, and those of modules that a test imports:
torch._dynamo, which a region's first backward pass imports, has a hundred thousand objects. The functions here restore
that when they end.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 50  # modules: fewer than an import of torch._dynamo, more than a test has of its own
_seen = 0


def set_aside() -> None:
    """Have collections look only at objects that are made from now on."""
    global _seen
    gc.collect()
    gc.freeze()
    _seen = len(sys.modules)


def set_imports_aside() -> None:
    """The same, where many modules were imported since it was last done."""
    if len(sys.modules) > _seen + _MANY:
        set_aside()


@contextmanager
def no_collections() -> Iterator[None]:
    """In the block none begins by itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def what_is_new() -> Iterator[None]:
    """Have collections look only at objects that the block makes."""
    set_aside()
    try:
        yield
    finally:
        gc.unfreeze()
        set_aside()


@contextmanager
def all_objects() -> Iterator[None]:
    """Have ``gc.get_objects`` give all objects in the block."""
    gc.unfreeze()
    try:
        yield
    finally:
        set_aside()
