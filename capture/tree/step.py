"""Marks by which the caller says where one step ends and the next begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from capture.native import seen


@seen
class Marks:
    """The marks of one thread."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = 0


class _Here(threading.local):
    def __init__(self) -> None:
        self.marks = Marks()


_here = _Here()


def mark_step_begin() -> None:
    """Say that a new step begins in this thread: the path of recordings that ran since the last mark ends.

    Outputs still held keep their values (``outputs="preserve"``), or raise on use (``"borrow"``). Once this was
    called, a thread's steps no longer end by themselves.
    """
    _here.marks.begun += 1


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
    return _here.marks.begun


def marks() -> Marks:
    """The marks of this thread."""
    return _here.marks


def use_marks(of_some_thread: Marks) -> None:
    """Make these the marks of this thread."""
    _here.marks = of_some_thread
