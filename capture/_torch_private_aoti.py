"""What torch has for packages of AOTInductor without documenting it. Source: torch 2.11 and 2.13, headers and bindings.

Loads no compiler: the class that loads packages is a binding of torch's own library.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from attrs import frozen

Loader: Any = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)
"""The class of ``AOTICompiledModel.loader``. Without it packages are code that no operator tells of: run eagerly on the
CPU, and on a device as any kernel that is not seen."""

EntryPoint = Literal["single-threaded", "threaded", "missing", "unknown"]
"""What a loaded package calls. ``missing``: ``threaded``, and its library has no other. ``unknown``: nothing tells."""

_ENTRIES = {
    b"AOTInductorModelContainerRun": "threaded",
    b"AOTInductorModelContainerRunSingleThreaded": "single-threaded",
}
_SINGLE = "AOTInductorModelContainerRunSingleThreaded"
_LOADER_WORDS = 16  # of the loader, where its runner is the fifth
_RUNNER_WORDS = 32  # of the runner, where the entry point is the sixth


class _Symbol(ctypes.Structure):
    """``Dl_info`` of the C library."""

    _fields_ = (
        ("library", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p),
    )  # fmt: skip


@frozen
class Bindings:
    """The loader's own methods, whatever stands in their place now."""

    run: Callable[..., Any]
    boxed_run: Callable[..., Any]


def bindings() -> Bindings | None:
    """The methods that run a package; None where the class, or one of them, is missing."""
    run, boxed_run = getattr(Loader, "run", None), getattr(Loader, "boxed_run", None)
    return None if run is None or boxed_run is None else Bindings(run, boxed_run)


UPDATES = tuple(name for name in ("load_constants", "update_constant_buffer") if hasattr(Loader, name))
"""Methods of the loader that give a package other constants."""


def runs_on_device(loader: Any) -> bool:
    """The package was compiled for an accelerator. Without the entry in its metadata: yes."""
    metadata: Mapping[str, str] = getattr(loader, "get_metadata", dict)()
    return metadata.get("AOTI_DEVICE_KEY") != "cpu"


def entry_point(loader: Any) -> EntryPoint:
    """Which function of its library a package calls.

    No binding tells, so the runner's memory is looked through for a function of that name: read by the kernel, which
    refuses what is no memory. Without ``/proc``, ``dladdr``, or with another layout: ``unknown``. About 0.1 ms.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return "unknown"
    try:
        found = _symbols_below(memory, loader)
    except (AttributeError, OSError):
        return "unknown"
    finally:
        os.close(memory)
    if len(found) != 1:
        return "unknown"
    ((name, library),) = found.items()
    if _ENTRIES[name] == "single-threaded":
        return "single-threaded"
    return "threaded" if _has_single(library) else "missing"


def _symbols_below(memory: int, loader: Any) -> dict[bytes, bytes]:
    """The entry points that the loader's runner holds, each with the file of its library."""
    look_up = ctypes.CDLL(None).dladdr
    look_up.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    found = {}
    for held in _words(memory, id(loader) + object.__basicsize__, 1):
        for runner in _words(memory, held, _LOADER_WORDS):
            for word in _words(memory, runner, _RUNNER_WORDS):
                symbol = _Symbol()
                if look_up(word, ctypes.byref(symbol)) and symbol.at == word and symbol.name in _ENTRIES:
                    found[symbol.name] = symbol.library
    return found


def _words(memory: int, address: int, count: int) -> tuple[int, ...]:
    """Up to so many pointers at an address; none where no memory is."""
    try:
        data = os.pread(memory, 8 * count, address)
    except (OSError, OverflowError):
        return ()
    return struct.unpack(f"{len(data) // 8}Q", data[: len(data) // 8 * 8])


def _has_single(library: bytes) -> bool:
    try:
        return hasattr(ctypes.CDLL(library.decode(), mode=os.RTLD_NOLOAD | os.RTLD_LAZY), _SINGLE)
    except OSError:
        return True
