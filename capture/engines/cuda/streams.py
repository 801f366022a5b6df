"""Order between streams that only this library knows to be needed.

``Tensor.record_stream`` on an output says that another stream goes on using it after it died. The allocator heeds that
for its own blocks only; for memory of a pool the next replay waits for that stream.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from capture.core import forks
from capture.core.alive import Alive
from capture.core.data import frozen
from capture.core.interrupts import guarded, suppress
from capture.engines.cuda.driver import driver_function
from capture.native import native
from capture.observe.capture_lock import BusyError, locked, locked_or
from capture.torch_private.capabilities import unseen
from capture.torch_private.cuda import is_capturing, raw_stream, stop_allocating

Result = TypeVar("Result")

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_MOST_CAPTURES = 100  # of others that a replay with draws waits for
_drew_on: dict[torch.device, tuple[int, torch.cuda.Stream]] = {}
"""The stream of each device that the last graph with draws was launched or captured on."""
_draws = forks.lock()
"""Held while a graph with draws is launched, or a capture begins. Whoever has it waits for nobody."""
_CAPTURED = object()
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
    workspaces = capture_stream.workspaces
    if workspaces is None:
        return
    before = torch.cuda.current_stream(device)
    capture_stream.stream.wait_stream(before)

    def mend(_: list[BaseException]) -> None:
        stop_allocating(device.index, workspaces.id)
        torch.cuda.set_stream(before)

    guarded(_take_workspaces, (capture_stream, device), mend)


def _take_workspaces(capture_stream: CaptureStream, device: torch.device) -> None:
    with (
        torch.cuda.stream(capture_stream.stream),
        unseen(),
        torch.cuda.use_mem_pool(capture_stream.workspaces, device),
        torch.no_grad(),
    ):
        torch.cuda.current_blas_handle()
        with suppress(RuntimeError):  # products that are not deterministic may be forbidden
            square = torch.zeros(8, 8, device=device)
            torch.addmm(square[0], square, square)  # with a bias it is cuBLASLt's


def wait_for_streams_on(pool: StreamUser) -> None:
    """Have replays wait from now on for a stream that ``Tensor.record_stream`` names for memory of this pool."""
    global _installed
    if not _installed:
        _installed = True
        _install()
    _pools.add(pool)


def in_order(device: torch.device, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call what launches a graph with draws on the current stream, or begins a capture there: after the last one that
    did. torch 2.11 keeps one seed and offset in device memory for all graphs of a generator; it writes them before each
    launch and as a capture begins, so that no other thread may come between the two.

    Nothing can wait for a stream that another thread captures on: its end is waited for. Raises ``BusyError`` where
    that thread may be waiting for this one."""
    for _ in range(_MOST_CAPTURES):
        result: Any = native.locked(_draws, _after_last, (device, function, arguments), forks.wait_on)
        if result is not _CAPTURED:
            return result  # type: ignore[no-any-return]
        locked(_nothing)
    raise BusyError("other threads capture graphs with draws one after another")


def _after_last(device: torch.device, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    number, before = raw_stream(device.index), _drew_on.get(device)
    if before is None or before[0] != number:
        now = torch.cuda.current_stream(device)
        if before is not None:
            if _is_captured(before[1]):
                return _CAPTURED
            now.wait_stream(before[1])
        _drew_on[device] = number, now
    return function(*arguments)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    ask, status = driver_function("cuStreamIsCapturing"), ctypes.c_int()
    if ask is None:
        with torch.cuda.stream(stream):
            return is_capturing()
    return not ask(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status)) and bool(status.value)


def _nothing() -> None:
    """What is done under the lock of captures by who only waits for it."""


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
        now = functools.partial(synchronize, device)
        locked_or(now, now)

    torch.cuda.synchronize = wait
