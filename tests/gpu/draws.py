"""Bodies that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Draw = Callable[[Tensor, Any], Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda x, g: x + torch.rand(x.shape, generator=g, device=x.device),
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g, device=x.device),
    "randint": lambda x, g: x + torch.randint(0, 1000, x.shape, generator=g, device=x.device),
    "bernoulli": lambda x, g: x + torch.bernoulli(torch.full_like(x, 0.5), generator=g),
    "bernoulli_": lambda x, g: x + torch.empty_like(x).bernoulli_(0.3, generator=g),
    "exponential_": lambda x, g: x + torch.empty_like(x).exponential_(2.0, generator=g),
    "normal_": lambda x, g: x + torch.empty_like(x).normal_(1.0, 3.0, generator=g),
    "uniform_": lambda x, g: x + torch.empty_like(x).uniform_(-1, 1, generator=g),
    "normal": lambda x, g: torch.normal(x, torch.ones_like(x), generator=g),
    "multinomial": lambda x, g: torch.multinomial((x + 1).flatten(), 3, generator=g) * 1.5,
    "multinomial replaced": lambda x, g: torch.multinomial((x + 1).flatten(), 9, replacement=True, generator=g) * 1.5,
    "randperm": lambda x, g: torch.randperm(x.numel(), generator=g, device=x.device) + x.flatten(),
    "several": lambda x, g: (
        torch.rand(7, generator=g, device=x.device).sum()
        + torch.randn(x.shape, generator=g, device=x.device)
        + torch.empty(3, 4, device=x.device).exponential_(generator=g)
    ),
}
DEFAULT_ONLY: dict[str, Draw] = {
    "dropout": lambda x, g: functional.dropout(x, 0.5),
    "dropout twice": lambda x, g: functional.dropout(functional.dropout(x, 0.3), 0.2) + functional.dropout(x, 0.9),
    "feature dropout": lambda x, g: functional.dropout2d(x.view(1, 3, 2, 2), 0.5).flatten(),
    "rand_like": lambda x, g: torch.rand_like(x) + torch.randn_like(x) * torch.randint_like(x, 9),
    "rrelu": lambda x, g: functional.rrelu(x, training=True),
    "large": lambda x, g: torch.rand(513, 1025, device=x.device) + x.sum(),
}
