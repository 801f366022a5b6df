"""cuBLAS has a workspace for each thread and stream, and frees all when told to, as CUDAGraph Trees do. Recordings go
on using theirs, which must not be given to others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capture import capture, config, mark_step_begin, recordings
from tests.gpu.support import DEVICE, needs_cuda, rand, same

pytestmark = needs_cuda
ROWS, WIDTH = 64, 768  # such products are split, and partial sums are in the workspace


@pytest.fixture(autouse=True)
def _with_gradients() -> Iterator[None]:
    with torch.enable_grad(), config.patch(cache=False):
        yield


def forget_workspaces() -> None:
    """Free cuBLAS's workspaces, as CUDAGraph Trees do; the next allocation gets their memory."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


class World:
    """Steps of a few products with biases, forward and backward: eager, in a region, or recorded as a whole."""

    def __init__(self, kind: Literal["eager", "autograd", "accumulate", "whole step"]) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.model = nn.Sequential(*layers).to(DEVICE)
        self.forward: Any = self.model
        self.run: Any = self._run
        if kind == "whole step":

            def run(x: Tensor) -> list[Tensor]:
                return self._run(x)

            self.run = capture(run)
        elif kind != "eager":
            self.forward = capture(self.model, gradients=kind)
        self.captured = self.run if kind == "whole step" else self.forward

    def _run(self, x: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        loss = functional.mse_loss(self.forward(x), x)
        loss.backward()
        return [loss.detach(), *[one.grad for one in self.model.parameters() if one.grad is not None]]

    def step(self, x: Tensor) -> list[Tensor]:
        """Loss and gradients, copied."""
        mark_step_begin()
        return [one.clone() for one in self.run(x)]


def memory_of_others(count: int) -> list[Tensor]:
    """Tensors of 32 MiB each, full of NaN."""
    return [torch.full((8 << 20,), float("nan"), device=DEVICE) for _ in range(count)]


@pytest.mark.parametrize("kind", ["autograd", "accumulate", "whole step"])
@pytest.mark.parametrize("forgotten", ["once", "in every step"])
def test_forgotten_workspaces(kind: Literal["autograd", "accumulate", "whole step"], forgotten: str) -> None:
    eager, ours = World("eager"), World(kind)
    for turn in range(16):
        x = rand(ROWS, WIDTH, seed=turn)
        expected = eager.step(x)
        if forgotten == "in every step" or turn == 8:
            forget_workspaces()
        taken = memory_of_others(4)
        same(ours.step(x), expected)
        assert all(bool(workspace.isnan().all()) for workspace in taken)
        del taken
    assert recordings(ours.captured).replays >= 10


def test_backward_passes_that_run_eagerly_between_recordings() -> None:
    """Eager backward passes run their nodes on the stream on which recordings are made."""
    eager, ours = World("eager"), World("autograd")
    for turn in range(12):
        x = rand(ROWS, WIDTH, seed=turn)
        expected = eager.step(x)
        if turn in (3, 6, 9):
            forget_workspaces()
            mark_step_begin()
            result = ours.forward(x)
            with config.patch(enabled=False):
                result.sum().backward()
        same(ours.step(x), expected)
    forget_workspaces()
    taken = memory_of_others(8)
    for turn in range(4):
        x = rand(ROWS, WIDTH, seed=turn)
        same(ours.step(x), eager.step(x))
    assert all(bool(workspace.isnan().all()) for workspace in taken)
