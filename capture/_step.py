"""Steps: the caller says where one pass ends and the next begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Counter(threading.local):
    begun: int = 0


_counter = _Counter()


def mark_step_begin() -> None:
    """Say that a new step begins in this thread: the path of recordings that ran since the last mark ends.

    Outputs still held keep their values (``outputs="preserve"``), or raise on use (``"borrow"``). Once this was
    called, a thread's steps no longer end by themselves.
    """
    _counter.begun += 1


@contextmanager
def step() -> Iterator[None]:
    """``with step():`` marks the beginning of a step and its end."""
    mark_step_begin()
    try:
        yield
    finally:
        mark_step_begin()


def steps_begun() -> int:
    """Marks seen in this thread; 0 means that steps end by themselves."""
    return _counter.begun
