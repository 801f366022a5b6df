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
    """Call the function while no other thread watches or records. Not a context manager: a signal between two steps of
    Python could leave the lock held."""
    result: Result = native.locked(capture_lock, function, arguments)
    return result


@forks.in_child
def _free() -> None:
    """In a child: the lock's holder may be a thread that does not exist there."""
    forks.free(capture_lock)
