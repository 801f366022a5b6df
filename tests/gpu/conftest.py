"""Fixtures for all tests on a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from capture import config, reset
from capture.tree import step
from capture.tree.thread_trees import forget_trees
from tests.gpu.support import ON_CUDA, forget_runs


@pytest.fixture(autouse=True, scope="package")
def small_heap() -> Iterator[None]:
    """Freeze the objects that imports made, so that collections skip them: the collection before each recording would
    take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without gradients, plans on disk, marks and trees of another test. Memory that nothing uses reads as
    NaN."""
    step.marks().begun = 0
    forget_trees()
    forget_runs()
    with torch.no_grad(), config.patch(poison=True, cache=False):
        yield
    if ON_CUDA and torch.cuda.is_available():
        torch.cuda.synchronize()
    reset()
    step.marks().begun = 0
    forget_trees()
