"""Replaced: attributes of torch's classes and modules that are others while a body is watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_INHERITED = object()


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
