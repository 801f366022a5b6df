"""What the blocks of ``docs/transformers.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin

__all__ = ["capture", "mark_step_begin", "model", "position", "token", "tokens", "torch"]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(16, 8), nn.Embedding(512, 8), nn.Linear(8, 16)

    @override
    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(token) + self.place(position)))
        return logits


torch.set_grad_enabled(False)
model, token, position = Decoder(), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
tokens: list[Tensor] = []
