"""Helpers for tests of bodies that write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import config
from capture.tree import thread_trees
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No gradients, no plans on disk, no marks and no tree of another test; freed memory reads as NaN."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False, poison=True):
        yield


def bits(value: Any) -> Any:
    """A result as a value that equals another one's where the two are equal bit for bit."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(member) for member in value]
    if isinstance(value, dict):
        return [(key, bits(member)) for key, member in value.items()]
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


class Cache:
    """An object that makes its tensors at its first use, as caches of transformers do."""

    def __init__(self) -> None:
        self.ready = False

    def update(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self.values = torch.zeros_like(x)
            self.width = x.shape[-1]
        self.values.add_(x)
        return self.values
