"""Sampling from a normalizing flow: each replay draws the numbers that an eager call would draw."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import capture, recordings
from examples.gain import gain
from examples.workloads import Coupling

torch.manual_seed(0)
torch.set_num_threads(1)
flow = nn.Sequential(*[Coupling() for _ in range(16)])


def sample() -> Tensor:
    points: Tensor = flow(torch.randn(16, 2))
    return points


captured = capture(sample)
with torch.no_grad():
    torch.manual_seed(1)
    expected = [sample() for _ in range(10)]
    torch.manual_seed(1)
    drawn = [captured() for _ in range(10)]
    print("same samples as eager:", all(map(torch.equal, drawn, expected)))
    print("all different:", len({float(points[0, 0]) for points in drawn}) == 10)
    print(recordings(captured).replays, "replays")
    print(gain(sample, captured))
    print("why: 16 layers of nine small operators each; views need no replay at all")
