"""Functions, bodies and fixtures for tests of chains."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config
from capture.tree import thread_trees
from tests.support.device import DEVICE, know_nothing_of_writes


@pytest.fixture(autouse=True, params=["tape", "graph"])
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """No gradients, no plans on disk, no marks and no tree of another test; freed memory reads as NaN. ``graph``: the
    engine does not know where its recordings write, as one that records graphs."""
    if request.param == "graph":
        know_nothing_of_writes(monkeypatch)
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False, poison=True):
        yield
    gc.collect()


def bits(value: Any) -> Any:
    """A result as a value that equals another one's where the two are equal bit for bit."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(member) for member in value]
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


def f_eager(x: Tensor) -> Tensor:
    return torch.tanh(x) * 1.5 + 0.25


@pytest.fixture
def f() -> Callable[[Tensor], Tensor]:
    return capture(lambda x: f_eager(x))
