"""Functions and classes in every form that the decorator takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No gradients, no plans on disk, no marks and no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


@pytest.fixture(autouse=True)
def with_gradients() -> Iterator[None]:
    """As ``fresh``, with gradients, and no warnings of this library."""
    thread_trees.forget_trees()
    with torch.enable_grad(), config.patch(cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def bits(tensor: Tensor) -> tuple[object, ...]:
    """All that makes two tensors equal bit for bit."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def check_replays(captured: Callable[..., Tensor], eager: Callable[..., Tensor], *, rest: tuple[Any, ...] = ()) -> None:
    """Check five calls: values are eager's, the body ran twice, and three calls replayed one recording."""
    for seed in range(5):
        x = torch.randn(3, 4, generator=torch.Generator(DEVICE).manual_seed(seed))
        assert bits(captured(x, *rest)) == bits(eager(x, *rest))
    seen = recordings(captured)
    assert (seen.observations, seen.recordings, seen.replays, seen.body_runs) == (1, 1, 3, 2)


def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    """Relu of x, scaled."""
    return torch.relu(x) * scale + 1


class Net(nn.Module):
    """Not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    @override
    def forward(self, x: Tensor, shift: float = 0.5) -> Tensor:
        """Linear, relu, scale."""
        return torch.relu(self.linear(x)) * self.scale + shift


class CapturedNet(Net):
    """A module whose forward and another method are captured."""

    @override
    @capture
    def forward(self, x: Tensor, shift: float = 0.5) -> Tensor:
        """Linear, relu, scale."""
        return torch.relu(self.linear(x)) * self.scale + shift

    @capture(max_recordings=2)
    def step(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


@capture
def module_level(x: Tensor) -> Tensor:
    return torch.relu(x) + 1
