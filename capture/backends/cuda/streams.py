"""Streams: order between streams that only this library knows to be needed.

``Tensor.record_stream`` on an output says that another stream goes on using it after it died. The allocator heeds that
for its own blocks only; for memory of a pool the next replay waits for that stream.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from capture._lock import PATIENCE, capture_lock
from capture.backends.cuda.driver import function

if TYPE_CHECKING:
    from capture.backends.cuda.pool import CudaPool

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_drew_on: dict[torch.device, torch.cuda.Stream] = {}
"""The stream of each device that the last graph with draws was launched or captured on."""
_pools: weakref.WeakSet[CudaPool] = weakref.WeakSet()
_installed = False


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else gets: torch hands out the same 32 streams in turn, and who gets one that is being
    captured cannot use it. Where the driver cannot be asked it is one of those. Lives as long as the process."""
    create, handle = function("cuStreamCreate"), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # the driver wants the device's context to be there
        if create is None or create(ctypes.byref(handle), _NON_BLOCKING) or not handle.value:
            return torch.cuda.Stream(device)
        return torch.cuda.ExternalStream(handle.value, device=device)


def follow(pool: CudaPool) -> None:
    """From now on a stream recorded on memory of this pool is waited for."""
    global _installed
    if not _installed:
        _installed = True
        _install()
    _pools.add(pool)


def order_draws(device: torch.device) -> None:
    """Order the current stream after the last graph that draws: torch keeps one seed and offset in device memory for
    all graphs of a generator, and writes them before each launch."""
    now = torch.cuda.current_stream(device)
    before = _drew_on.get(device)
    if before is not None and before != now:
        now.wait_stream(before)
    _drew_on[device] = now


def _install() -> None:
    _wait_for_captures()
    original: Any = torch.Tensor.record_stream

    @functools.wraps(original)
    def record_stream(self: torch.Tensor, s: Any) -> None:
        original(self, s)
        if self.device.type == "cuda":
            address = self.data_ptr()
            for pool in list(_pools):
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
