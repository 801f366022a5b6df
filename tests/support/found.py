"""Helpers for tests of bugs that the random programs found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

CALLS = 6


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ones(value: float = 1.0) -> Tensor:
    """A new tensor, so that nothing is shared by accident."""
    return torch.full((4,), float(value))
