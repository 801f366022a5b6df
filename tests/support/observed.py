"""Helpers for tests of watched runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import (
    Explanation,
    config,
)
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
    if isinstance(value, dict):
        return [(key, bits(member)) for key, member in value.items()]
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    if value.is_conj():
        return "conj", bits(value.conj())
    flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return value.dtype, tuple(value.shape), value.stride(), flat.view(torch.uint8).tolist() if len(flat) else []


def x_of(seed: int = 0, *shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


def codes(explanation: Explanation, least: Any = "note") -> list[str]:
    return [finding.code for finding in explanation.findings_at_least(least)]


def line_of(function: Callable[..., Any], text: str) -> tuple[int, str]:
    """Number and text of the line of a function's source that ends with the comment ``# text``."""
    lines, first = inspect.getsourcelines(function)
    for number, line in enumerate(lines, first):
        if line.rstrip().endswith(f"# {text}"):
            return number, line.strip()
    raise LookupError(text)


def reads_item(x: Tensor) -> Tensor:
    y = torch.relu(x)
    scale = float(np.from_dlpack(y.detach().sum().cpu()))  # here
    return y * scale
