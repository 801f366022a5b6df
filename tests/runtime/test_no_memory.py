"""Memory that runs out in the middle of a call: an operator's, this library's, or Python's own."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config
from tests.support.processes import run_python

KIB, MIB = 1 << 10, 1 << 20
_MMAP_THRESHOLD = -3  # of ``mallopt``
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")


def _taken() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def no_more_than(nbytes: int) -> Iterator[None]:
    """The process may take so many bytes more than it has. Garbage is collected and free memory of the heap is used up
    before: operators would find their memory there."""
    gc.collect()
    libc, held = ctypes.CDLL(None), list[int]()
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    begin = _taken()
    while _taken() == begin and len(held) < 50_000:
        held.append(libc.malloc(96 * KIB))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_taken() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        for block in held:
            libc.free(block)


class Net(nn.Module):
    """Some MiB for each operator; writes a buffer, then an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.register_buffer("total", torch.zeros((), device="cpu"))
        self.h = torch.zeros(3 * MIB // 4, device="cpu")

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x.repeat(3) * 2
        self.total.add_(y.sum())
        z = torch.tanh(y) + self.h
        self.h = z * 0.5
        result: Tensor = torch.cat([z, y])[:: MIB // 2]
        return result

    def state(self) -> tuple[float, float]:
        return float(self.total), float(self.h[1::4096].sum())


def twin_of(model: Net) -> Net:
    made = Net()
    made.load_state_dict(model.state_dict())
    made.h = model.h.clone()
    return made


def prefixes(model: Net, x: Tensor) -> list[tuple[float, float]]:
    """States that an eager call from here may be stopped in."""
    after, half = twin_of(model), twin_of(model)
    after(x)
    half.total.copy_(after.total)
    return [model.state(), half.state(), after.state()]


@torch.no_grad()
@config.patch(cache=False, strict=False)
def run_short_of_memory(call: int) -> None:
    """What the call raises is what eager does; the state is a prefix of eager's, and all that follows is right."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 128 * KIB)  # glibc's default, kept: freed blocks go back to the system
    failed = 0
    for megabytes in (0.5, 2, 4, 7, 10, 13):
        model, x = Net(), torch.ones(MIB // 4, device="cpu")
        f = capture(model)
        for _ in range(call - 1):
            f(x)
        allowed = prefixes(model, x)
        raised: Exception | None = None
        try:
            with no_more_than(int(megabytes * MIB)):
                f(x)
        except (RuntimeError, MemoryError) as error:
            raised = error
            failed += 1
        assert raised is None or isinstance(raised, MemoryError) or "memory" in str(raised)
        assert model.state() in allowed
        eager = twin_of(model)
        for _ in range(3):
            assert torch.equal(f(x), eager(x))
            assert model.state() == eager.state()
    assert failed


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_operator_gets_no_memory(call: int) -> None:
    """In a process of its own: how much memory other tests left free decides which operator finds none."""
    ended = run_python(f"from tests.runtime.test_no_memory import run_short_of_memory as run; run({call})")
    assert ended.returncode == 0, ended.stderr
