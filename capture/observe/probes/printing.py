"""``print`` while a body is watched: it writes its text in every replay, as an island does."""

from __future__ import annotations

import builtins
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from capture.torch_private.monkeypatch import replaced

_print = builtins.print


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
