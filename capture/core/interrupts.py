"""Tells exceptions that a signal handler raised from all others. They reach the caller unchanged, wherever they are
raised."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal

# the C module: Python's ``signal`` wraps each result in an enumeration, which takes 30 times as long
from _signal import getsignal as _handler_of  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from typing_extensions import override

from capture.native import native

Result = TypeVar("Result")

_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep
_SIGNALS = tuple(map(int, signal.valid_signals()))


def is_interrupt(error: BaseException) -> bool:
    """Whether a signal handler raised it. An exception that is no ``Exception`` (as ``KeyboardInterrupt``) always
    counts as an interrupt."""
    if not isinstance(error, Exception):
        return True
    at = error.__traceback__
    set_by_python = (handler for number in _SIGNALS if callable(handler := _handler_of(number)))
    handlers = {_code_of(handler) for handler in set_by_python} - {None}
    while handlers and at is not None:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def let_through(error: BaseException) -> None:
    """Raise it again where a signal handler raised it: for what treats errors of another kind as an answer."""
    if is_interrupt(error):
        raise error


def guarded(
    run: Callable[..., Result], arguments: tuple[Any, ...], mend: Callable[[list[BaseException]], None]
) -> Result:
    """What ``run`` gives. Whatever ends it, ``mend(errors)`` is called until it ends well, with what ended the call and
    what ended ``mend`` since. The first of them is raised, or the interrupt that came while ``mend`` ran, as after a
    ``finally``: the first may be dealt with further out, and the interrupt would be lost."""
    result: Result = native.guarded(run, arguments, functools.partial(_mended, mend))
    return result


def _mended(mend: Callable[[list[BaseException]], None], errors: list[BaseException]) -> BaseException | None:
    mend(errors)
    return next((error for error in errors[:0:-1] if is_interrupt(error)), None)


def let_go_of_frames(error: BaseException) -> None:
    """Have frames of this library that the error has passed forget their variables, as it leaves the library.

    Some of them have the error itself, so that the cycle would wait for the garbage collector, and with it outputs and
    tensors of a recording that came to nothing: eager code frees its own at once. The lines stay in the traceback."""
    pending: list[BaseException | None] = [error]
    seen = set[int]()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        pending += [one.__cause__, one.__context__]
        passed = one.__traceback__
        while passed is not None:
            _clear(passed.tb_frame, seen)
            passed = passed.tb_next


def _clear(frame: FrameType | None, seen: set[int]) -> None:
    """Clear a frame and its callers, up to one that is not over. An error that was put off is raised further out, so
    that its traceback lacks some of them."""
    while frame is not None and id(frame) not in seen:
        seen.add(id(frame))
        code = frame.f_code
        if code.co_filename.startswith(_LIBRARY) and not code.co_flags & inspect.CO_GENERATOR:  # one may be resumed
            try:
                frame.clear()
            except RuntimeError as running:
                let_through(running)
                return
        frame = frame.f_back


class suppress(contextlib.suppress):
    """As ``contextlib.suppress``, but for what a signal handler raised."""

    @override
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        is_meant = super().__exit__(kind, error, traceback)
        return bool(is_meant) and error is not None and not is_interrupt(error)


def _code_of(handler: Any) -> Any:
    several = (handler, getattr(handler, "__func__", None), getattr(handler, "func", None))
    found = [getattr(one, "__code__", None) for one in (*several, vars(type(handler)).get("__call__"))]
    return next((one for one in found if one is not None), None)
