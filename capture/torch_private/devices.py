"""Devices: what is so on one type of device and not on another, each question asked in one place.

For what lies below the engines: a run that is watched has none yet. Whoever has an engine asks that.
"""

from __future__ import annotations

import functools
import operator
import platform
from collections.abc import Callable
from typing import Any

import torch

from capture.torch_private import cuda

AUTOCAST_TYPES = ("cpu", "cuda")
"""Device types whose autocast is looked at."""
DEFAULT_AUTOCAST_TYPE = "cuda"
"""The device type that ``torch.set_autocast_enabled(True)`` means."""
ACCELERATOR_METHODS = frozenset(["cuda"])
"""Methods of a tensor that move it to the device they are named after."""


_DEEPER_AND_OUT: tuple[Any, ...] = tuple(
    getattr(torch, f"autocast_{name}_nesting", None) for name in ("increment", "decrement")
)


def autocast_depth() -> int:
    """How many blocks of autocast are open in this thread; with the last one its cache goes. 1 where torch does not
    tell. Both calls are made by C code: an interrupt between them would leave the thread in a block for ever, in which
    weights are cast once for all steps."""
    if None in _DEEPER_AND_OUT:
        return 1
    return int([*map(operator.call, _DEEPER_AND_OUT)][1])


def has_captures() -> bool:
    """Whether some device of this machine can record graphs of kernels."""
    return torch.backends.cuda.is_built() and torch.cuda.is_available()


def captures_kernels(device: torch.device) -> bool:
    """Whether kernels are recorded there, whoever launches them, and not operators: an operator need not show them, and
    no copy from ordinary host memory may be among them."""
    return device.type == "cuda"


def is_current(device: torch.device) -> bool:
    """Whether this is the accelerator that a device without an index means. Initialises no device that is not in
    use."""
    return device.type == "cuda" and torch.cuda.is_initialized() and device.index == torch.cuda.current_device()


def model_of(device_type: str | None) -> str:
    """What kernels for a device depend on, beside torch: those of this machine, of the CPU for None. Asked only of a
    type that is in use: else that would start it, and no fork could use it any more."""
    if device_type == "cuda" and torch.cuda.is_available():
        return "cuda {}.{}".format(*torch.cuda.get_device_capability())
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def stream_reader(device: torch.device) -> Callable[[], int]:
    """Gives the handle of the stream that is current on a device; 0 where there are none."""
    if device.type != "cuda":
        return int
    return functools.partial(cuda.raw_stream, device.index)


def is_capturing_now() -> bool:
    """Whether the current stream of an accelerator in use is being captured."""
    return torch.cuda.is_initialized() and cuda.is_capturing()


# ------------------------------------------------------------------------------- calls that wait for a device, debugged

WAITS = (
    (torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "query"), (torch.cuda.Event, "query"),
)  # fmt: skip
"""Calls that wait for a device, or ask whether it is done: the holder, and the name."""


WAITED = "called a synchronizing CUDA operation"
"""How a warning of the mode below begins."""
IS_PROTOTYPE = "Synchronization debug mode is a prototype"
"""How the warning begins that setting it gives."""


def may_wait() -> bool:
    """Whether a device is in use that the host may wait for."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def wait_debug_mode() -> int:
    """What torch does where the host waits for a device: 0 nothing, 1 warn, 2 raise."""
    return torch.cuda.get_sync_debug_mode()


def set_wait_debug_mode(mode: int) -> None:
    """Set what torch does where the host waits for a device, in all threads: 0, 1 or 2, as ``wait_debug_mode``
    gives."""
    torch.cuda.set_sync_debug_mode(mode)
