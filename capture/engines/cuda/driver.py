"""Nodes: count what a capture holds so far, to find kernels that no operator tells of.

Triton, CuPy, numba and hand-written extensions launch without the dispatcher. Such a kernel is captured like any
other, but which memory it reads and writes cannot be seen. The driver is asked directly, as this happens twice an
operator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from capture._fast import native
from capture.backends.cuda.driver import function, is_reached_from_c

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def node_counter(stream: torch.cuda.Stream) -> Callable[[], int] | None:
    """A function that counts the nodes of the capture on a stream (1 us, in C 0.2); None where nobody can.

    The graph is looked up every time: its handle is void once a capture has failed.
    """
    info, nodes = function("cuStreamGetCaptureInfo_v2"), function("cuGraphGetNodes")
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
