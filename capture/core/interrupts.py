"""Tells exceptions that a signal handler raised from all others. They reach the caller unchanged, wherever they are
raised."""

from __future__ import annotations

import signal
from typing import Any


def is_interrupt(error: BaseException) -> bool:
    """A signal handler raised it. An exception that is no ``Exception`` (as ``KeyboardInterrupt``) always counts as an
    interrupt."""
    if not isinstance(error, Exception):
        return True
    handlers = {_code_of(signal.getsignal(one)) for one in signal.valid_signals()} - {None}
    at = error.__traceback__
    while at is not None and handlers:
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def _code_of(handler: Any) -> Any:
    several = (handler, getattr(handler, "__func__", None), getattr(handler, "func", None))
    found = [getattr(one, "__code__", None) for one in (*several, vars(type(handler)).get("__call__"))]
    return next((one for one in found if one is not None), None)
