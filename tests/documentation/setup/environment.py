"""What the blocks of ``docs/environment.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import nn

from capture import capture

model, x = capture(nn.Linear(4, 4)), torch.randn(2, 4)
