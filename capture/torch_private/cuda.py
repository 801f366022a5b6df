"""What only the CUDA engine needs of torch beyond its documentation: pools, graphs, streams and memory.

The same rule holds: each name is looked up behind a probe, with a stated fallback.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from capture.core.interrupts import let_through, suppress

PoolId = tuple[int, int]


def pool_state(device: int, pool: PoolId) -> Any:
    """Layout of a private pool, to be put back by ``set_pool_state``. Needs ``pool_checkpoint``, like all below."""
    return torch._C._cuda_getCheckpointState(device, pool)


def set_pool_state(device: int, state: Any) -> None:
    """Take exactly the blocks of this state (2.5 us and up). Nobody owns them: ``free_block`` gives them back."""
    torch._C._cuda_setCheckpointPoolState(device, state, [], [])


def free_block(address: int) -> None:
    """Give back a block that no storage owns."""
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)


def disown(storage: torch.UntypedStorage) -> None:
    """Give back a storage's block now; the storage goes on looking at it."""
    torch._C._free_And_Remove_DeleterFn(storage._cdata)


def pool_holds(device: int, pool: PoolId, addresses: set[int]) -> bool:
    """Whether exactly these blocks are taken in the pool (1 us)."""
    return bool(torch._C._cuda_checkPoolLiveAllocations(device, pool, addresses))


def pool_segments(pool: PoolId) -> list[tuple[int, int]]:
    """Address and bytes of the memory a pool has (150 us).

    torch 2.11 gives back a reference to each number of the id that it never took: they are lent one here.
    """
    for number in pool:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    snapshot = torch._C._cuda_memorySnapshot(pool)
    return [(segment["address"], segment["total_size"]) for segment in snapshot["segments"]]


def memory_snapshot() -> dict[str, Any]:
    """What torch's viewer of memory shows: segments, and the history if it is recorded; nothing where CUDA is unused.
    Without this name the segments alone, by the public function."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {"segments": [], "device_traces": []}
    found: Any = getattr(torch.cuda.memory, "_snapshot", None)
    made = {"segments": torch.cuda.memory_snapshot(), "device_traces": []} if found is None else found()
    return dict(made)


def expandable_segments() -> bool:
    """Whether the allocator extends its segments in place. Where torch does not tell its settings, those of the
    environment count."""
    told = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")()
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = told or ",".join(os.environ.get(name, "") for name in names)
    return "expandable_segments:true" in text.lower().replace(" ", "")


def stop_allocating(device: int, pool: PoolId) -> None:
    """End the route of allocations to a pool, and its use count: what ``capture_end`` leaves undone if it raises (2.11,
    2.13), and ``use_mem_pool`` where a signal comes in its first or last line.

    Without these names allocations of later captures would still be asked to go to the dead pool. Where there is no
    route, torch says so, and the count stays: what is released twice ends the process. Nothing comes between the two.
    """
    names = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    steps = [functools.partial(getattr(torch._C, name), device, pool) for name in names if hasattr(torch._C, name)]
    with suppress(RuntimeError):
        list(map(operator.call, steps))


def has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether its capture has ended well. False where torch does not tell."""
    try:
        return bool(graph.raw_cuda_graph())
    except (RuntimeError, AttributeError) as error:
        let_through(error)
        return False


def _public_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _public_capturing)
"""The current stream is being captured (0.1 us). Asking makes a CUDA context, so only CUDA functions may ask."""


def graph_launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What launches a graph on the current stream: the method below torch's own in Python (0.2 us less), which only
    looks for inputs that died. Without it torch's own."""
    below = getattr(super(torch.cuda.CUDAGraph, graph), "replay", None)
    return graph.replay if below is None else below


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)
"""Handle of the current stream (0.07 us); the public call takes 3.3 us."""


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""Index of the current device (0.05 us); the public call takes 0.3 us."""


def cuda_storage(address: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """A storage over device memory that it does not own. Without torch's builder: 2 us more, and a Python object."""
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        memory = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}
        return torch.as_tensor(types.SimpleNamespace(__cuda_array_interface__=memory), device=device).untyped_storage()
    storage: torch.UntypedStorage = make(address, device, nbytes)
    return storage


def cuda_builder(
    address: int, device: torch.device, nbytes: int, dtype: torch.dtype, shape: Any, stride: Any, offset: int
) -> Callable[[], torch.Tensor]:
    """A function that makes a tensor on a storage of its own over device memory (1.2 us; else 3 us)."""
    storage = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    tensor = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
    if storage is None or tensor is None:
        empty = torch.empty
        return lambda: empty(0, dtype=dtype, device=device).set_(
            cuda_storage(address, device, nbytes), offset, shape, stride
        )
    meta = {"size": shape, "stride": stride, "dtype": dtype, "device": device, "storage_offset": offset}
    return lambda: tensor(meta, storage(address, device, nbytes))
