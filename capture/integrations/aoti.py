"""Packages of AOTInductor: what a loaded one can be used for, told before it is called.

Nothing has to be asked: ``capture(model)``, and any captured function that calls ``model``, finds this out by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capture.core.errors import AnnotationError
from capture.torch_private import aoti as private
from capture.torch_private.aoti import EntryPoint


def entry_point(model: Callable[..., Any]) -> EntryPoint:
    """Which entry point of its library a loaded package calls.

    Args:
        model: what ``torch._inductor.aoti_load_package`` gave.

    Returns:
        ``"single-threaded"``: a graph can hold it. ``"threaded"``: none can; load it with ``run_single_threaded=True``.
        ``"unknown"``: it was loaded before this library was imported, or by C++, and nothing tells.

    Raises:
        AnnotationError: it is no loaded package, or this torch has none.
    """
    loader = getattr(model, "loader", None)
    if private.Loader is None or not isinstance(loader, private.Loader):
        raise AnnotationError(f"this is no loaded package of AOTInductor but a {type(model).__qualname__}")
    return private.entry_point(loader)
