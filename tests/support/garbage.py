"""What the garbage collector looks at: a process with torch has a million objects, and a full look takes half a second.

``conftest.py`` sets aside all that is there before the first test. What sets more aside, or takes it back, ends as it
began.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def set_aside() -> None:
    """Collections look at what is made from now on."""
    gc.collect()
    gc.freeze()


@contextmanager
def what_is_new() -> Iterator[None]:
    """In the block collections look at what it makes alone."""
    set_aside()
    try:
        yield
    finally:
        gc.unfreeze()
        set_aside()


@contextmanager
def all_objects() -> Iterator[None]:
    """In the block ``gc.get_objects`` gives them all."""
    gc.unfreeze()
    try:
        yield
    finally:
        set_aside()
