"""Gradients of several micro-batches add up in ``.grad``, inside a captured step, before the optimizer takes one."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, mark_step_begin, recordings
from examples.gain import gain

torch.manual_seed(0)
MICRO_BATCHES = 4


class Learner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)

    def gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Add this micro-batch's gradients to ``.grad``."""
        loss = F.mse_loss(self.model(x), y) / MICRO_BATCHES
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def train(learner: Learner, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        mark_step_begin()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            x = torch.randn(16, 8, generator=generator)
            total += learner.gradients(x, x.sum(-1, keepdim=True)).item()
        learner.update()
        losses.append(total)
    return losses


model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
captured, eager = Learner(model), Learner(copy.deepcopy(model))
for parameter in [*captured.model.parameters(), *eager.model.parameters()]:
    parameter.grad = torch.zeros_like(parameter)  # from the first step on there is a gradient to add to
captured.gradients = capture(captured.gradients)  # type: ignore[method-assign]
captured.update = capture(captured.update)  # type: ignore[method-assign]

print("same losses as eager:", train(captured, 20) == train(eager, 20))
print(recordings(captured.gradients))
print(recordings(captured.update))
print(gain(lambda: train(eager, 5), lambda: train(captured, 5), calls=2), "(five steps a call)")
print("why: forward, backward and the optimizer are replayed; the data and the loop around them are eager")
