"""What ``docs/warmup.md`` takes for granted."""

from __future__ import annotations

import torch
from torch import Tensor

from capture import capture, warmup

__all__ = ["Tensor", "capture", "torch", "warmup"]
