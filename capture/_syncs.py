"""Syncs: calls that make the host wait for a CUDA device, found by torch's own debug mode while a body is watched.

Operators that read values are known by their schema; this finds the others, such as solvers that look at a status.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_TEXT = "called a synchronizing CUDA operation"
_CALLS = (
    (torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "query"), (torch.cuda.Event, "query"),
)  # fmt: skip


@contextmanager
def device_syncs(note: Callable[[str], None], operator: Callable[[], str | None]) -> Iterator[None]:
    """Call ``note(name)`` at each sync in this thread. ``operator``: the one that runs, None to look away."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        yield
        return
    thread = threading.get_ident()
    shown = warnings.showwarning

    def show(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith(_TEXT) or before:
            shown(message, category, *args, **kwargs)
        if str(message).startswith(_TEXT) and threading.get_ident() == thread:
            name = operator()
            if name is not None:
                note(name)

    saved = [(holder, name, holder.__dict__[name]) for holder, name in _CALLS if name in holder.__dict__]
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_TEXT)
        warnings.showwarning = show
        for holder, name, original in saved:
            setattr(holder, name, _noting(f"{holder.__name__}.{name}", original, note, thread))
        torch.cuda.set_sync_debug_mode(before or "warn")  # a mode of the user's stays, an error included
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
            for holder, name, original in saved:
                setattr(holder, name, original)


def _noting(name: str, original: Any, note: Callable[[str], None], thread: int) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            note(name)
        return original(*args, **kwargs)

    return call
