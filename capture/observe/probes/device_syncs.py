"""Calls in Python that make the host wait for a device, found while a body is watched.

Operators that read values are known by their schema. One that waits inside, such as a solver that looks at a status,
fails while it is captured, and the recorder tells its name: torch's debug mode would tell it in the watched run, but it
is one of the whole process, and warns in other threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from capture.torch_private import devices
from capture.torch_private.monkeypatch import replaced


@contextmanager
def device_syncs(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note(name)`` at each such call in this thread."""
    if not devices.may_wait():
        yield
        return
    thread = threading.get_ident()
    with contextlib.ExitStack() as around:
        for holder, name in devices.WAITS:
            if name in holder.__dict__:
                waiting = _noting(f"{holder.__name__}.{name}", holder.__dict__[name], note, thread)
                around.enter_context(replaced(holder, {name: waiting}))
        yield


def _noting(name: str, original: Any, note: Callable[[str], None], thread: int) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            note(name)
        return original(*args, **kwargs)

    return call
