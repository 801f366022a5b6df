"""Calls that make the host wait for a device, found by torch's own debug mode while a body is watched.

Operators that read values are known by their schema; this finds the others, such as solvers that read a status. The
debug mode belongs to the whole process; its warnings are hidden from other threads. A trial capture cannot be used
instead: a solver of cuSOLVER that was called in a capture fails in every later call of the process, captured or not
(``torch.linalg.eigh`` on torch 2.11).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from capture.torch_private import devices
from capture.torch_private.monkeypatch import replaced


class _Filter:
    """The message of a warning filter that stays in place: a call that began under a watch may warn when it is over,
    in any thread. It swallows what only the debug mode of a watch asked for."""

    def __init__(self) -> None:
        self.listeners: dict[int, Callable[[], None]] = {}
        """By thread."""
        self.users_mode = 0
        self.is_setting = False

    def match(self, text: str) -> bool:
        """What the module ``warnings`` asks of a filter's message."""
        if not text.startswith(devices.WAITED):
            return self.is_setting and text.startswith(devices.IS_PROTOTYPE)
        listener = self.listeners.get(threading.get_ident())
        if listener is not None:
            listener()
        return not (self.users_mode if self.listeners else devices.wait_debug_mode())

    def set_mode(self, mode: int) -> None:
        """Without torch's remark that the mode is a prototype."""
        self.put_first()
        self.is_setting = True
        try:
            devices.set_wait_debug_mode(mode)
        finally:
            self.is_setting = False

    def put_first(self) -> None:
        """Put it before all other filters."""
        item: Any = ("ignore", self, UserWarning, None, 0)
        if warnings.filters[:1] != [item]:
            warnings.filters.insert(0, item)  # type: ignore[attr-defined]
            with warnings.catch_warnings():
                pass  # this has the interpreter forget its cached decisions


_filter = _Filter()


@contextmanager
def device_syncs(note_sync: Callable[[str], None], operator: Callable[[], str | None]) -> Iterator[None]:
    """Call ``note_sync(name)`` at each sync in this thread. ``operator``: the one that runs, None to look away."""
    if not devices.may_wait():
        yield
        return
    thread = threading.get_ident()

    def listen() -> None:
        name = operator()
        if name is not None:
            note_sync(name)

    before = _filter.users_mode = devices.wait_debug_mode()
    try:
        _filter.listeners[thread] = listen
        with contextlib.ExitStack() as around:
            for holder, name in devices.WAITS:
                if name in holder.__dict__:
                    waiting = _noting(f"{holder.__name__}.{name}", holder.__dict__[name], note_sync, thread)
                    around.enter_context(replaced(holder, {name: waiting}))
            _filter.set_mode(before or 1)  # a mode of the user's stays, an error included
            yield
    finally:
        if devices.may_wait():  # in the child of a fork that the body made, torch sets nothing, and raises
            _filter.set_mode(before)
        _filter.listeners.pop(thread, None)


@contextmanager
def unnoticed() -> Iterator[None]:
    """What this thread waits for in the block is no sync of a body's, nor one that a user's debug mode asks about."""
    if not devices.may_wait():
        yield
        return
    listener, before = _filter.listeners.pop(threading.get_ident(), None), devices.wait_debug_mode()
    _filter.set_mode(0)
    try:
        yield
    finally:
        if devices.may_wait():
            _filter.set_mode(before)
        if listener is not None:
            _filter.listeners[threading.get_ident()] = listener


def _noting(name: str, original: Any, note_sync: Callable[[str], None], thread: int) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            note_sync(name)
        return original(*args, **kwargs)

    return call
