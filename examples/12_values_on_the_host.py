"""A branch on a tensor's value: the recording ends there; a replay reads the value and goes on where it led before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import capture, explain, recordings
from examples.gain import gain

torch.manual_seed(0)
torch.set_num_threads(1)
layers = [module for _ in range(40) for module in (nn.Linear(16, 16), nn.Tanh())]
before, usual, rare = nn.Sequential(*layers), nn.Sequential(*layers[:40]), nn.Linear(16, 16)


def forward(x: Tensor) -> Tensor:
    hidden = before(x)
    out: Tensor = rare(hidden) if hidden.abs().max() > 0.9 else usual(hidden)
    return out


captured = capture(forward)
with torch.no_grad():
    inputs = [torch.randn(4, 16) * (30 if number % 5 == 4 else 0.1) for number in range(40)]
    print("equal to eager:", all(torch.equal(captured(x), forward(x)) for x in inputs))
    noted = explain(forward)(inputs[0]).findings
    print("noted:", [finding.code for finding in noted if finding.code == "CG201"])
    print("replays:", recordings(captured).replays, "- eager calls:", recordings(captured).eager_calls)
    print(gain(lambda: forward(inputs[0]), lambda: captured(inputs[0])))
    print("why: two segments are replayed instead of 122 operators; between them the replay waits for one number")
