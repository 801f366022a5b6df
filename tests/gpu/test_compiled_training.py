"""Training through functions that Inductor compiled: their buffers come from no operator."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, config, mark_step_begin, recordings
from tests.gpu.support import DEVICE, needs_cuda, rand, same

STEPS = 10


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.enable_grad(), config.patch(cache=False):
        yield


def net() -> nn.Module:
    """Saved activations, views of them, and matrix products outside of compiled kernels."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers).to(DEVICE)


class World:
    """One model and its optimizer, with or without recordings."""

    def __init__(self, model: nn.Module, kind: str, gradients: Literal["autograd", "accumulate"]) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=DEVICE), capturable=True)
        self.forward: Any = torch.compile(model)
        self.step: Any = self._step
        if kind == "region":
            compiled = self.forward
            self.forward = capture(lambda x: compiled(x), gradients=gradients)
        elif kind == "whole step":

            def step(x: Tensor) -> Tensor:
                return self._step(x)

            self.step = capture(step)

    def _step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.forward(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@needs_cuda
@pytest.mark.parametrize(
    ("kind", "gradients"), [("region", "autograd"), ("region", "accumulate"), ("whole step", None)]
)
def test_training_is_recorded(kind: str, gradients: Any) -> None:
    first = net()
    theirs, ours = World(copy.deepcopy(first), "compiled", "autograd"), World(first, kind, gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for step in range(STEPS):
            x = rand(32, 64, seed=step)
            losses = []
            for world in (theirs, ours):
                mark_step_begin()
                losses.append(world.step(x).clone())
            same(*losses)
            for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
                same(one, other)
                assert one.grad is not None
                assert other.grad is not None
                same(one.grad, other.grad)
    counted = recordings(ours.step if kind == "whole step" else ours.forward)
    assert counted.replays >= STEPS - 6, (counted, [(one.code, one.what) for one in counted.findings])
