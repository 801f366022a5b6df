"""What torch has for packages of AOTInductor without documenting it. Source: torch 2.11 and 2.13, headers and bindings.

Loads no compiler: the class that loads packages is a binding of torch's own library.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import frozen

from capture.torch_private.libraries import library

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
_RUNNER_WORDS = 32  # of the runner, where the entry point is the sixth
_GET_RUNNER = "_ZN5torch8inductor22AOTIModelPackageLoader10get_runnerEv"
"""The loader's method that gives its runner: it reads the fifth word of the loader."""
_LOADER_WORDS = 5


class _Symbol(ctypes.Structure):
    """``Dl_info`` of the C library."""

    _fields_ = (
        ("library", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p),
    )  # fmt: skip


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
    """The package was compiled for an accelerator. Without the entry in its metadata: yes."""
    metadata: Mapping[str, str] = getattr(loader, "get_metadata", dict)()
    return metadata.get("AOTI_DEVICE_KEY") != "cpu"


def entry_point(loader: Any) -> EntryPoint:
    """Which function of its library a package calls.

    No binding tells, so the runner's memory is looked through for a function of that name: read by the kernel, which
    refuses what is no memory. Without ``/proc``, ``dladdr``, the loader's method that gives its runner, or with another
    layout: ``unknown``. About 0.1 ms.
    """
    if Loader is None or not isinstance(loader, Loader):
        return "unknown"
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return "unknown"
    try:
        return _first_entry(_words(memory, _runner(memory, loader), _RUNNER_WORDS))
    except (AttributeError, OSError):
        return "unknown"
    finally:
        os.close(memory)


def _runner(memory: int, loader: Any) -> int:
    """The address of the loader's runner, or 0. Asked of the loader's own method: memory beside a loader is another's,
    with a runner of its own."""
    ask = getattr(library("libtorch_cpu"), _GET_RUNNER)
    ask.argtypes, ask.restype = [ctypes.c_void_p], ctypes.c_void_p
    for held in _words(memory, id(loader) + object.__basicsize__, 1):  # pybind11 keeps the object first
        if len(_words(memory, held, _LOADER_WORDS)) == _LOADER_WORDS:
            return ask(held) or 0
    return 0


def _first_entry(runner: Sequence[int]) -> EntryPoint:
    look_up = ctypes.CDLL(None).dladdr
    look_up.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    for word in runner:
        symbol = _Symbol()
        if look_up(word, ctypes.byref(symbol)) and symbol.at == word and symbol.name in _ENTRIES:
            if _ENTRIES[symbol.name] == "single-threaded":
                return "single-threaded"
            return "threaded" if _has_single(symbol.library) else "missing"
    return "unknown"


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
