"""One body at a time is watched or recorded in a process."""

from __future__ import annotations

import threading

from capture.core import forks

capture_lock = threading.RLock()
"""Held while a body is watched or recorded."""
PATIENCE = 5.0  # seconds to wait for it where its holder may itself be waiting for this thread


@forks.in_child
def _free() -> None:
    """Its holder may be a thread that the child does not have."""
    forks.free(capture_lock)
