"""Captures inside other captures: the body is inlined, and its own recordings stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.gpu.support import counts, eager, needs_cuda, rand, same

pytestmark = needs_cuda


@pytest.mark.parametrize("first", ["cold", "recorded"])
def test_row_186_inside_a_capture_of_the_user(first: str) -> None:
    """Under the caller's own ``torch.cuda.graph`` the body is inlined, with or without recordings of its own."""

    @capture
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2 + 1

    x = rand(64)
    if first == "recorded":
        for i in range(3):
            f(rand(64, seed=i))
    before = counts(f)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x + 1) * 3
    assert counts(f)[1:3] == before[1:3]
    for i in range(4):
        x.copy_(rand(64, seed=i))
        graph.replay()
        same(y, (torch.tanh(x + 1) * 2 + 1) * 3)
        z = f(x)
        same(z, eager(f, x))
        same(y, (torch.tanh(x + 1) * 2 + 1) * 3)


def test_row_185_captured_in_captured() -> None:
    """The inner function becomes part of the outer recording and keeps recordings of its own."""

    @capture
    def inner(x: Tensor) -> Tensor:
        return x * 2

    @capture
    def outer(x: Tensor) -> Tensor:
        return inner(x + 1) + inner(x)

    for i in range(6):
        x = rand(64, seed=i)
        same(outer(x), (x + 1) * 2 + x * 2)
        same(inner(x), x * 2)
    assert recordings(outer).recordings == recordings(inner).recordings == 1
    assert recordings(outer).replays == recordings(inner).replays == 4
