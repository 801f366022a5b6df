"""What the blocks of ``docs/training.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from capture import capture, mark_step_begin

__all__ = ["F", "capture", "loader", "mark_step_begin", "model", "optimizer"]


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4))

    @property
    def blocks(self) -> list[nn.Module]:
        return [self[1]]


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=torch.cuda.is_available())
loader = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(6)]
