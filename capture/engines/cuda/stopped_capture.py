"""The way back from a capture that something stopped: its end failed, or an exception came before its end."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from capture.core.interrupts import let_through
from capture.engines.cuda.streams import in_order
from capture.torch_private import cuda
from capture.torch_private.warned import warned

_ATTEMPTS = 3  # another thread's sync may end a capture at any moment


def end_stopped_capture(
    graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator], device: torch.device, pool: cuda.PoolId
) -> None:
    """No capture goes on on the current stream, and nothing of torch takes it for one that does.

    It may be stopped itself, and be called again: each step asks torch for what is still to be done. A capture that
    never began leaves a graph that has not ended, too; of its steps only the last one does anything.
    """
    if cuda.is_capturing():
        _done(warned, torch.cuda.CUDAGraph.capture_end, graph)
    if cuda.has_ended(graph):
        return
    # torch goes on asking it whether a stream is its own when pinned memory comes and goes, up to the very end
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
    cuda.stop_allocating(device.index, pool)
    for _ in range(_ATTEMPTS):
        if _done(_capture_nothing, generators, device):
            return


def _done(function: Callable[..., object], *arguments: object) -> bool:
    """Whether torch did not object."""
    try:
        function(*arguments)
    except RuntimeError as error:
        let_through(error)
        return False
    return True


def _capture_nothing(generators: Sequence[torch.Generator], device: torch.device) -> None:
    """A capture that ends well takes its generators, and the device's own, out of capture mode."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    in_order(device, graph.capture_begin, torch.cuda.graph_pool_handle(), "relaxed")
    warned(torch.cuda.CUDAGraph.capture_end, graph)  # torch says that it is empty
