"""What the blocks of ``docs/steps.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import nn

from capture import capture, mark_step_begin

__all__ = ["body", "head", "mark_step_begin", "stream"]

body, head = capture(nn.Linear(8, 8)), capture(nn.Linear(8, 2))
stream = [torch.randn(2, 8) for _ in range(4)]
