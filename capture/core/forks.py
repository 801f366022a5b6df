"""What has to be reset in a child process after ``fork``, before anything else runs there.

A child has only the thread that forked. What the parent's other threads had begun is never finished in the child: locks
that they held stay locked, and replacements that they put on torch's classes stay in place. Each module that keeps such
state registers here how to reset it. Nothing waits before the fork.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[[], None])
_first: list[Callable[[], None]] = []
_before: list[Callable[[], None]] = []


def in_child(function: Function) -> Function:
    """Have the child of a fork call this, in the order of registration. It must not wait, nor need other threads."""
    _first.append(function)
    return function


def before_fork(function: Function) -> Function:
    """Have the thread that forks call this before it does."""
    _before.append(function)
    return function


def leave_to_parent(thing: Any) -> None:
    """In a child: keep this object for the rest of the process. Its destructor would call a driver that does not work
    in a child."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def free(lock: Any) -> None:
    """Release a reentrant lock in a child, unless the one thread that is left holds it."""
    if not lock._is_owned():
        lock._at_fork_reinit()


def lock() -> Any:
    """A lock that is free in a child, unless the thread that forks holds it. Reentrant: a finalizer or a signal handler
    may call captured functions wherever the thread is."""
    made = threading.RLock()
    _first.append(functools.partial(free, made))
    return made


def wait_on() -> None:
    """For ``native.locked``: what one does meanwhile who waits for a lock as long as it takes."""


def _call_each(functions: list[Callable[[], None]]) -> None:
    failed: BaseException | None = None
    for function in functions:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the others have to run; the interpreter then prints it
            failed = failed or error
    if failed is not None:
        raise failed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _call_each(_before), after_in_child=lambda: _call_each(_first))
