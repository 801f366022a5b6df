"""What torch has for packages of AOTInductor without documenting it. Source: torch 2.11 and 2.13, headers and bindings.

Loads no compiler: the class that loads packages is a binding of torch's own library.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from capture.core.data import frozen

Loader: Any = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)
"""The class of ``AOTICompiledModel.loader``. Without it packages are code that no operator tells of: run eagerly on the
CPU, and on a device as any kernel that is not seen."""

EntryPoint = Literal["single-threaded", "threaded", "unknown"]
"""What a loaded package calls. ``unknown``: nothing tells."""

_SINGLE_THREADED = 2  # position of that option, after the path and the name of the model
_loaded: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Whether a loader was made with ``run_single_threaded=True``."""


@frozen
class RunnerMethods:
    """The loader's own methods, whatever stands in their place now."""

    run: Callable[..., Any]
    boxed_run: Callable[..., Any]


def runner_methods() -> RunnerMethods | None:
    """The methods that run a package; None where the class, or one of them, is missing."""
    run, boxed_run = getattr(Loader, "run", None), getattr(Loader, "boxed_run", None)
    return None if run is None or boxed_run is None else RunnerMethods(run, boxed_run)


UPDATES = tuple(name for name in ("load_constants", "update_constant_buffer") if hasattr(Loader, name))
"""Methods of the loader that give a package other constants."""


def runs_on_device(loader: Any) -> bool:
    """Whether the package was compiled for an accelerator. True without the entry in its metadata."""
    metadata: Mapping[str, str] = getattr(loader, "get_metadata", dict)()
    return metadata.get("AOTI_DEVICE_KEY") != "cpu"


def entry_point(loader: Any) -> EntryPoint:
    """Which function of its library a package calls.

    No binding tells, so what each loader was made with is noted from the import of this library on. torch refuses
    ``run_single_threaded=True`` for a package that has no such function. Loaded earlier, or by C++: ``unknown``.
    """
    if Loader is None or not isinstance(loader, Loader) or loader not in _loaded:
        return "unknown"
    return "single-threaded" if _loaded[loader] else "threaded"


def _note_loaders() -> None:
    """For good: a package may be loaded at any time. It is called as it was, and one attribute of the class is set."""
    original = Loader.__init__

    @functools.wraps(original)
    def make(loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        asked = args[_SINGLE_THREADED] if len(args) > _SINGLE_THREADED else None
        if isinstance(asked, bool):
            _loaded[loader] = asked

    Loader.__init__ = make


if Loader is not None:
    _note_loaders()
