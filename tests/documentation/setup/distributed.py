"""What the blocks of ``docs/distributed.md`` use and do not define: a model as one process has it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from capture import capture

__all__ = ["F", "capture", "model", "optimizer"]

model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
