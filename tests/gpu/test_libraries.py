"""Operators of libraries with their own handles and plans, and the memory that failures and recordings leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from capture import capture, recordings, release
from tests.gpu.support import (
    allocated,
    healthy,
    may_fall_back,
    needs_cuda,
    needs_gpu,
    rand,
)
from tests.gpu.trouble import Body, Trouble, as_eager, make, only_then, raise_trouble

pytestmark = [needs_gpu, may_fall_back]

LIBRARIES: dict[str, Body] = {
    "svd": lambda x: torch.linalg.svd(x),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "eigh": lambda x: torch.linalg.eigh(x + x.t())[0],
    "solve": lambda x: torch.linalg.solve(x + 5 * torch.eye(4, device=x.device), x),
    "solve_ex": lambda x: torch.linalg.solve_ex(x + 5 * torch.eye(4, device=x.device), x)[0],
    "inv": lambda x: torch.linalg.inv(x + 5 * torch.eye(4, device=x.device)),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.t() + torch.eye(4, device=x.device)),
    "qr": lambda x: torch.linalg.qr(x),
    "det": lambda x: torch.linalg.det(x),
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x),
    "fft": lambda x: torch.fft.fft(x),
    "rfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x)),
    "sort": lambda x: torch.sort(x, dim=0),
    "argsort": lambda x: x.flatten().argsort(stable=True),
    "large sort": lambda x: torch.sort(x.flatten().repeat(5000))[0],
    "topk": lambda x: torch.topk(x, 2),
    "kthvalue": lambda x: torch.kthvalue(x, 2),
    "one_hot": lambda x: functional.one_hot((x.abs() * 3).long()),
    "one_hot of n": lambda x: functional.one_hot((x.abs() * 3).long(), 8),
    "cumsum": lambda x: x.cumsum(0) + x.cumprod(1),
    "histc": lambda x: torch.histc(x, 8, -1, 1),
    "searchsorted": lambda x: torch.searchsorted(torch.sort(x[0])[0], x[1]),
    "embedding": lambda x: functional.embedding((x.abs() * 3).long(), x),
    "index_put accumulated": lambda x: torch.zeros_like(x).index_put_(
        (torch.arange(4, device=x.device),), x, accumulate=True
    ),
    "scatter": lambda x: torch.zeros_like(x).scatter_(0, torch.arange(4, device=x.device).expand(4, 4), x),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 3.0),
    "bmm": lambda x: torch.bmm(x.expand(3, 4, 4), x.expand(3, 4, 4)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "attention": lambda x: functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "conv": lambda x: functional.conv2d(x[None, None], x[None, None, :3, :3], padding=1),
    "interpolate": lambda x: functional.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "lstm": lambda x: torch.lstm_cell(x, (x, x), x.repeat(4, 1), x.repeat(4, 1)),
    "cross entropy": lambda x: functional.cross_entropy(x, torch.arange(4, device=x.device)),
    "quantile": lambda x: x.quantile(0.3),
    "views only": lambda x: x.view(2, 8).t()[1:],
    "memory only": lambda x: torch.empty_like(x).size(),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries(name: str) -> None:
    """Operators with handles, plans, workspaces or checks of their own: eager's values, recorded or not."""
    as_eager(LIBRARIES[name], calls=4)


@needs_cuda
@pytest.mark.parametrize("name", ["sort", "topk", "fft", "one_hot of n", "cumsum", "solve_ex", "bmm", "conv"])
def test_libraries_are_recorded(name: str) -> None:
    """The usual operators of libraries are recorded and not run eagerly."""
    assert recordings(as_eager(LIBRARIES[name], calls=4)).replays == 2


KINDS: tuple[Body, ...] = (
    only_then(raise_trouble),
    only_then(lambda x: x.sum().item()),
    only_then(lambda x: torch.cuda.synchronize()),
    only_then(lambda x: torch.empty(1 << 45, device=x.device)),
    lambda x: x * x.sum().item(),
    only_then(lambda x: torch.rand(1 << 18, device=x.device).sum().item()),
)


@needs_cuda
def test_memory_does_not_grow() -> None:
    """Two hundred failures, each of a new function that is then released or dropped, leave no memory behind."""

    def fail(number: int) -> None:
        body, _ = make(KINDS[number % len(KINDS)])
        f = capture(body)
        for i in range(2):
            try:
                f(rand(4, 4, seed=i))
            except Trouble:  # expected
                pass
        if number % 2:
            release(f)
        del f

    for number in range(2 * len(KINDS)):
        fail(number)
    before, reserved = allocated(), torch.cuda.memory_reserved()
    for number in range(200):
        fail(number)
    assert allocated() - before < 8 << 20
    assert torch.cuda.memory_reserved() - reserved < 64 << 20
    healthy()


@needs_cuda
def test_memory_of_recordings_that_come_and_go() -> None:
    """Functions are recorded without a failure, and their outputs are held for a while."""
    held: list[Any] = []

    def use_once(number: int) -> None:
        f = capture(make(lambda x: torch.rand(1 << 16, device=x.device) + x.sum())[0])
        held.append([f(rand(4, 4, seed=i)) for i in range(3)])
        del held[:-3]
        if number % 2:
            release(f)

    for number in range(10):
        use_once(number)
    held.clear()
    before = allocated()
    for number in range(60):
        use_once(number)
    held.clear()
    assert allocated() - before < 8 << 20
    healthy()
