"""Nodes: count what a capture holds so far, to find kernels that no operator tells of.

Triton, CuPy, numba and hand-written extensions launch without the dispatcher. Such a kernel is captured like any
other, but which memory it reads and writes cannot be seen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def node_counter(stream: torch.cuda.Stream) -> Callable[[], int] | None:
    """A function that counts the nodes of the capture on a stream (2 us); None without ``cuda-bindings``."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    handle = stream.cuda_stream

    def count() -> int:
        info: Any = runtime.cudaStreamGetCaptureInfo(handle)
        if int(info[0]) or not info[3]:
            return -1
        nodes: Any = runtime.cudaGraphGetNodes(info[3], 0)
        return int(nodes[-1]) if not int(nodes[0]) else -1

    return count if _works(runtime) else None


def _works(runtime: Any) -> bool:
    return all(hasattr(runtime, name) for name in ("cudaStreamGetCaptureInfo", "cudaGraphGetNodes"))
