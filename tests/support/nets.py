"""Small models that several test files use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override


class Mlp(nn.Module):
    """8 features in, 4 out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]
