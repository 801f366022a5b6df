"""What the blocks of ``docs/testing.md`` use and do not define: a model and an input."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from capture import capture

__all__ = ["cache", "decoder", "ids", "longer", "random", "requests", "sampler", "serve"]


@capture(static=["cache"])
def decoder(ids: Tensor, cache: Tensor) -> Tensor:
    cache.add_(ids.float())
    return torch.relu(cache) * 2


@capture
def sampler(logits: Tensor) -> Tensor:
    return (logits / torch.empty_like(logits).exponential_(1)).argmax(-1)


def serve(requests: list[Tensor]) -> None:
    for request in requests:
        sampler(decoder(request, cache))


ids, cache, longer = torch.ones(1, 4), torch.zeros(1, 4), torch.ones(3, 4)
requests = [ids] * 8
