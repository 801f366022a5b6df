"""What the blocks of ``docs/key.md`` use and do not define."""

from __future__ import annotations

import os
import types

from torch import Tensor

from capture import capture

__all__ = ["Tensor", "capture", "model", "os"]

model = types.SimpleNamespace(cfg=types.SimpleNamespace(scale=2.0))
