"""One body at a time is watched or recorded in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from capture.core import forks
from capture.native import native

Result = TypeVar("Result")

capture_lock = threading.RLock()
"""Held while a body is watched or recorded."""
PATIENCE = 5.0  # seconds to wait for it where its holder may itself be waiting for this thread


def locked(function: Callable[..., Result], *arguments: Any) -> Result:
    """The function's result, while no other thread watches or records. A ``with`` block may be left without the lock's
    being given back: a signal comes between any two steps of Python."""
    result: Result = native.locked(capture_lock, function, arguments)
    return result


@forks.in_child
def _free() -> None:
    """Its holder may be a thread that the child does not have."""
    forks.free(capture_lock)
