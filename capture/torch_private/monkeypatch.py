"""Attributes of torch's classes and modules that are others while a body is watched."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_INHERITED = object()
_TRUSTED = ("capture", "torch", "triton")
"""Whose code asks for what this library looks at, too: of what it made itself, or to compare with the next call."""


@contextmanager
def replaced(holder: Any, others: Mapping[str, Any]) -> Iterator[None]:
    """In the block ``holder`` has ``others``, by name; what it inherited before it inherits again afterwards."""
    saved = {name: holder.__dict__.get(name, _INHERITED) for name in others}
    for name, other in others.items():
        setattr(holder, name, other)
    try:
        yield
    finally:
        for name, original in saved.items():
            if original is _INHERITED:
                delattr(holder, name)
            else:
                setattr(holder, name, original)


def is_asked_by_users() -> bool:
    """Code of the user's called what stands for an attribute: the first frame outside of the calling module is one."""
    frame: Any = sys._getframe(1)
    stand_in = frame.f_globals
    while frame.f_globals is stand_in:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _TRUSTED
