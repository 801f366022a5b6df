"""What the blocks of ``docs/compile.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


model, x = Decoder(), torch.randn(2, 16)
torch.compiler.reset()
