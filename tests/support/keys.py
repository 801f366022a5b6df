"""Helpers for tests of the key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import config
from capture.tree import thread_trees
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No gradients, no plans on disk, no marks and no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def bits(value: Any) -> Any:
    """A result as a value that equals another one's where the two are equal bit for bit."""
    if isinstance(value, (tuple, list)):
        return type(value), [bits(member) for member in value]
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    raw = flat.view(torch.uint8).tolist() if len(flat) else []
    return value.dtype, tuple(value.shape), value.stride(), value.requires_grad, raw


def check_same(
    captured: Callable[..., Any], eager: Callable[..., Any], *args: Any, times: int = 4, **kwargs: Any
) -> None:
    """Check that several calls give eager's values."""
    for _ in range(times):
        assert bits(captured(*args, **kwargs)) == bits(eager(*args, **kwargs))


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


A, B, C, D, E = (x_of(seed) for seed in (0, 1, 2, 3, 5))


# ---------------------------------------------------------------------------------------------------- tensor metadata


def norm(x: Tensor, y: Tensor | None = None) -> Tensor:
    return torch.relu(x * 2) + (1 if y is None else y)


# ------------------------------------------------------------------------------------------------------ ambient modes


@contextlib.contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    old = get()
    put(value)
    try:
        yield
    finally:
        put(old)
