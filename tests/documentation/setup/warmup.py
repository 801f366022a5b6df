"""What the blocks of ``docs/warmup.md`` use and do not define."""

from __future__ import annotations

import torch
from torch import Tensor

from capture import capture, warmup

__all__ = ["Tensor", "capture", "torch", "warmup"]
