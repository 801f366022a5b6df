"""Order between streams that only this library knows to be needed.

``Tensor.record_stream`` on an output says that another stream goes on using it after it died. The allocator heeds that
for its own blocks only; for memory of a pool the next replay waits for that stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, Protocol

import torch
from attrs import frozen

from capture.core.alive import Alive
from capture.engines.cuda.driver import driver_function
from capture.observe.capture_lock import PATIENCE, capture_lock
from capture.torch_private.capabilities import unseen
from capture.torch_private.cuda import raw_stream

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_drew_on: dict[torch.device, tuple[int, torch.cuda.Stream]] = {}
"""The stream of each device that the last graph with draws was launched or captured on."""
_idle: dict[tuple[torch.device, bool], list[CaptureStream]] = {}
_pools: Alive[StreamUser] = Alive()
_installed = False


class StreamUser(Protocol):
    """The part of a pool that is about streams. ``beside``: streams that still use its memory."""

    device: torch.device
    beside: set[Any]

    def find(self, address: int) -> bool:
        """Whether the address lies in the pool."""


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else gets: torch hands out the same 32 streams in turn, and who gets one that is being
    captured cannot use it. Where the driver cannot be asked it is one of those. Lives as long as the process."""
    create, handle = driver_function("cuStreamCreate"), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # the driver wants the device's context to be there
        if create is None or create(ctypes.byref(handle), _NON_BLOCKING) or not handle.value:
            return torch.cuda.Stream(device)
        return torch.cuda.ExternalStream(handle.value, device=device)


@frozen(eq=False)
class CaptureStream:
    """A stream to capture on, and memory for the workspaces that cuBLAS has for it; pools take turns with them.

    ``ran_on``: handle of the stream that the last replay of the pool before ran on, which may still use a workspace.
    """

    stream: torch.cuda.Stream
    workspaces: Any
    """A ``torch.cuda.MemPool``; None where the allocator has none."""
    ran_on: int | None = None


def take_capture_stream(device: torch.device, *, shared: bool) -> CaptureStream:
    """A stream that no pool uses. ``shared``: the allocator has pools."""
    idle = _idle.setdefault((device, shared), [])
    if idle:
        return idle.pop()
    with torch.cuda.device(device):
        workspaces = torch.cuda.MemPool() if shared else None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(workspaces))  # cuBLAS uses it until the process ends
    return CaptureStream(own_stream(device), workspaces)


def return_capture_stream(device: torch.device, capture_stream: CaptureStream) -> None:
    """Let another pool have the stream."""
    _idle[device, capture_stream.workspaces is not None].append(capture_stream)


def keep_workspaces(capture_stream: CaptureStream, device: torch.device) -> None:
    """Have workspaces of cuBLAS and cuBLASLt ready for a capture, in memory that nothing else gets. Handles belong to a
    thread: autograd's own would need as much again, so that backward passes are captured in this one.

    A graph goes on to use the workspace it was captured with. Others make cuBLAS forget all workspaces, as CUDAGraph
    Trees do: what is freed stays here. This library forgets none, as graphs that users captured by hand need theirs.
    """
    if capture_stream.workspaces is None:
        return
    capture_stream.stream.wait_stream(torch.cuda.current_stream(device))
    with (
        torch.cuda.stream(capture_stream.stream),
        unseen(),
        torch.cuda.use_mem_pool(capture_stream.workspaces, device),
        torch.no_grad(),
    ):
        torch.cuda.current_blas_handle()
        with contextlib.suppress(RuntimeError):  # products that are not deterministic may be forbidden
            square = torch.zeros(8, 8, device=device)
            torch.addmm(square[0], square, square)  # with a bias it is cuBLASLt's


def wait_for_streams_on(pool: StreamUser) -> None:
    """Have replays wait from now on for a stream that ``Tensor.record_stream`` names for memory of this pool."""
    global _installed
    if not _installed:
        _installed = True
        _install()
    _pools.add(pool)


def order_draws(device: torch.device) -> None:
    """Order the current stream after the last graph that draws: torch keeps one seed and offset in device memory for
    all graphs of a generator, and writes them before each launch."""
    number, before = raw_stream(device.index), _drew_on.get(device)
    if before is not None and before[0] == number:
        return
    now = torch.cuda.current_stream(device)
    if before is not None:
        now.wait_stream(before[1])
    _drew_on[device] = number, now


def _install() -> None:
    _wait_for_captures()
    original: Any = torch.Tensor.record_stream

    @functools.wraps(original)
    def record_stream(self: torch.Tensor, s: Any) -> None:
        original(self, s)
        if self.device.type == "cuda":
            address = self.data_ptr()
            for pool in _pools.all():
                if pool.device == self.device and pool.find(address):
                    pool.beside.add(s)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]


def _wait_for_captures() -> None:
    """A device-wide sync fails, and ends the capture, while any thread captures: let it wait until nobody does."""
    synchronize: Any = torch.cuda.synchronize

    @functools.wraps(synchronize)
    def wait(device: Any = None) -> None:
        held = capture_lock.acquire(timeout=PATIENCE)
        try:
            synchronize(device)
        finally:
            if held:
                capture_lock.release()

    torch.cuda.synchronize = wait
