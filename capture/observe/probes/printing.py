"""What a body says while it is watched. ``print`` writes its text in every replay, as an island does."""

from __future__ import annotations

import builtins
import functools
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from capture.torch_private.monkeypatch import replaced

_print = builtins.print


class LeavesTraceError(Exception):
    """Ends a try of the body before it leaves what cannot be undone. The body may catch it, as any error of its own."""


@contextmanager
def telling(thread: int, ends: Callable[[], None]) -> Iterator[None]:
    """In the block, ``ends`` is called before this thread shows a warning or a record of ``logging``."""

    original, original_show = logging.Logger.callHandlers, getattr(warnings, "_showwarnmsg", None)

    @functools.wraps(original)
    def handle(*args: Any) -> None:
        if threading.get_ident() == thread:
            ends()
        original(*args)

    def show(message: Any) -> None:
        if threading.get_ident() == thread:
            _forget_shown(str(message.message), message.category)
            ends()
        if original_show is not None:
            original_show(message)

    shows = {"_showwarnmsg": show} if original_show is not None else {}
    with replaced(logging.Logger, {"callHandlers": handle}), replaced(warnings, shows):
        yield


def _forget_shown(text: str, category: type) -> None:
    """A warning is noted as shown before it is, so that it is shown once."""
    at: types.FrameType | None = sys._getframe(1)
    registries = [getattr(warnings, "onceregistry", {})]
    while at is not None:
        registries.append(at.f_globals.get("__warningregistry__", {}))
        at = at.f_back
    for registry in registries:
        for key in [key for key in list(registry) if isinstance(key, tuple) and key[:2] == (text, category)]:
            registry.pop(key, None)


@contextmanager
def printing(thread: int, island: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """In the block, calls of ``print`` in this thread go through ``island(function, args, kwargs)``."""
    original = builtins.print

    @functools.wraps(_print)
    def write(*args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        island(original, args, kwargs)
        return None

    with replaced(builtins, {"print": write}):
        yield
