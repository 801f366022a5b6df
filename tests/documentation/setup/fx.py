"""What the blocks of ``docs/fx.md`` use and do not define: a graph with a part that cannot be recorded, in the
middle."""

from __future__ import annotations

import torch
from torch import Tensor


def step(cache: Tensor, x: Tensor) -> Tensor:
    cache.add_(x)
    chosen = torch.relu(cache)[x > 0]
    return torch.tanh(chosen) * 2 + 1


gm = torch.fx.symbolic_trace(step)
cache = torch.zeros(4, 4)
batches = [torch.randn(4, 4) for _ in range(6)]
example_inputs = [cache, batches[0]]
