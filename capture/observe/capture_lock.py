"""One body at a time is watched or recorded in a process."""

from __future__ import annotations

import threading

capture_lock = threading.RLock()
"""Held while a body is watched or recorded."""
PATIENCE = 5.0  # seconds to wait for it where its holder may itself be waiting for this thread
