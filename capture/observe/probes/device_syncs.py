"""Calls that make the host wait for a device, found by torch's own debug mode while a body is watched.

Operators that read values are known by their schema; this finds the others, such as solvers that read a status. The
debug mode and the filter of its warnings belong to the whole process, so they are set only while no other thread runs
code of users. Beside others a wait shows when the capture fails, which costs the pool. That is no way for solvers: one
of cuSOLVER that was called in a capture fails in every later call of the process, captured or not
(``torch.linalg.eigh`` on torch 2.11). They, and operators that were seen to wait before, are taken to wait.
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
from capture.torch_private.threads import others_may_run

_seen_waiting: set[str] = set()
"""Names of operators."""


class _Filter:
    """The message of a warning filter. It stays in place: taken out, it would have the interpreter forget which
    warnings it has shown, and a call that began under a watch may warn when it is over. It swallows what only the debug
    mode of a watch asked for."""

    def __init__(self) -> None:
        self.listeners: dict[int, Callable[[], None]] = {}
        """By thread."""
        self.users_mode = 0
        self.is_setting = False
        self._item: Any = ("ignore", self, UserWarning, None, 0)

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
        if warnings.filters[:1] != [self._item]:
            warnings.filters.insert(0, self._item)  # type: ignore[attr-defined]
            with warnings.catch_warnings():
                pass  # this has the interpreter forget its cached decisions


_filter = _Filter()


@contextmanager
def device_syncs(
    note_sync: Callable[[str], None], operator: Callable[[], str | None], is_running: Callable[[], bool]
) -> Iterator[bool]:
    """Call ``note_sync(name)`` at each sync in this thread. ``operator``: the one that runs or ran last, None to look
    away. ``is_running``: it runs, so that it is the one that waits, in other bodies, too.

    Gives whether other threads kept it from looking: then ``is_taken_to_wait`` tells of operators.
    """
    thread, beside_others = threading.get_ident(), others_may_run()
    with contextlib.ExitStack() as around:
        for holder, name in devices.WAITS:
            if name in holder.__dict__:
                waiting = _noting(f"{holder.__name__}.{name}", holder.__dict__[name], note_sync, thread)
                around.enter_context(replaced(holder, {name: waiting}))
        if not beside_others:
            around.enter_context(_debugged(note_sync, operator, is_running, thread))
        yield beside_others


def is_taken_to_wait(name: str, base: str) -> bool:
    """Whether an operator waits for the device as far as is known without looking. No rule stands for the family of
    solvers: no schema tells of the status that they read, and a trial breaks them."""
    return name in _seen_waiting or base.lstrip("_").startswith("linalg_")


@contextmanager
def _debugged(
    note_sync: Callable[[str], None], operator: Callable[[], str | None], is_running: Callable[[], bool], thread: int
) -> Iterator[None]:
    def listen() -> None:
        name = operator()
        if name is None:
            return
        if is_running():
            _seen_waiting.add(name)
        note_sync(name)

    before = _filter.users_mode = devices.wait_debug_mode()
    try:
        _filter.listeners[thread] = listen
        _filter.set_mode(before or 1)  # a mode of the user's stays, an error included
        yield
    finally:
        if devices.may_wait():  # in the child of a fork that the body made, torch sets nothing, and raises
            _filter.set_mode(before)
        _filter.listeners.pop(thread, None)


@contextmanager
def unnoticed() -> Iterator[None]:
    """What this thread waits for in the block is no sync of a body's, nor one that a user's debug mode asks about."""
    before = devices.wait_debug_mode() if devices.may_wait() else 0
    if not before:
        yield
        return
    listener = _filter.listeners.pop(threading.get_ident(), None)
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
