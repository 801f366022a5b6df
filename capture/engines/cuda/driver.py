"""Functions of the CUDA driver library by their C interface, and the count of a capture's nodes that is made with them.

A package with bindings takes 0.1 s to import. The count tells kernels that no operator names: Triton, CuPy, numba and
hand-written extensions launch without the dispatcher. Such a kernel is captured like any other, but which memory it
reads and writes cannot be seen. The driver is asked directly, as this happens twice an operator.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from capture.core.interrupts import let_through
from capture.native import native
from capture.torch_private.probe import probe

_LIBRARY = "libcuda.so.1"
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@functools.cache
def driver_function(name: str) -> Callable[..., int] | None:
    """A function that gives the driver's error code; None if there is no such library or function."""
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(_LIBRARY), name)
    except (OSError, AttributeError) as error:
        let_through(error)
        return None
    return found


@probe
def is_reached_from_c() -> bool:
    """Whether the C module can copy and launch by itself."""
    return bool(native.use_driver(_LIBRARY))


def node_counter(stream: torch.cuda.Stream) -> Callable[[], int] | None:
    """A function that counts the nodes of the capture on a stream (1 us, in C 0.2); None where nobody can.

    The graph is looked up every time: its handle is void once a capture has failed.
    """
    info, nodes = driver_function("cuStreamGetCaptureInfo_v2"), driver_function("cuGraphGetNodes")
    if info is None or nodes is None:
        return None
    if is_reached_from_c():
        return native.NodeCount(stream.cuda_stream)  # type: ignore[no-any-return]
    handle = ctypes.c_void_p(stream.cuda_stream)
    status, identity, graph, number = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
    asked = (handle, ctypes.byref(status), ctypes.byref(identity), ctypes.byref(graph), None, None)
    counted = ctypes.byref(number)

    def count() -> int:
        if info(*asked) or status.value != _ACTIVE or nodes(graph, None, counted):
            return -1
        return number.value

    return count
