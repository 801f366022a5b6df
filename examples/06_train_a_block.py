"""One block of a model trains captured, forward and backward, inside an eager loop."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from examples.gain import gain

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    @override
    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return x + change


def train(model: nn.Sequential, steps: int) -> list[float]:
    torch.manual_seed(1)  # for the inputs, and for dropout: replays draw what eager would
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        mark_step_begin()
        optimizer.zero_grad()
        x = torch.randn(8, 16)
        loss = F.mse_loss(model(x), x.roll(1, -1))
        loss.backward()  # one node of this graph is the captured block: its backward pass is replayed, too
        optimizer.step()
        losses.append(loss.item())
    return losses


captured = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 16))
eager = copy.deepcopy(captured)
capture(captured[1])  # the other block stays eager

print("same losses as eager:", train(captured, 30) == train(eager, 30))
print(recordings(captured[1]))  # two recordings: forward and backward
print(gain(lambda: train(eager, 5), lambda: train(captured, 5), calls=2), "(five steps a call)")
print(
    "why: one block of four layers is replayed; capture the whole step, as in 10_actor_critic.py, for most of the gain"
)
