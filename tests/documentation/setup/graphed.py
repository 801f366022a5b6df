"""What the blocks of ``docs/graphed.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import nn

body, head = nn.Linear(8, 8), nn.Linear(8, 2)
x, h = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
