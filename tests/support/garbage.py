"""Keep old objects out of garbage collections: a process with torch has a million objects, and a full collection takes
half a second.

``conftest.py`` sets aside all objects from before the first test. The functions here restore that when they end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def set_aside() -> None:
    """Have collections look only at objects that are made from now on."""
    gc.collect()
    gc.freeze()


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
