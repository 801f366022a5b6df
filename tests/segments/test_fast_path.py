"""Calls whose body has breaks take the fast path up to the replay itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from capture.runtime import dispatch
from capture.tree import thread_trees
from tests.support.device import use_device
from tests.support.observed import bits


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without plans on disk and the tree of another test."""
    thread_trees.forget_trees()
    use_device()
    with config.patch(cache=False):
        yield


def branch(x: Tensor, kept: Tensor) -> Tensor:
    kept.add_(1)
    y = x * 2
    return y + kept if y[0] > 0 else y - kept


def warmed(function: Any, arguments: list[tuple[Tensor, ...]]) -> None:
    for _ in range(4):
        for args in arguments:
            function(*args)


@pytest.mark.parametrize("grad", [False, True])
def test_reads_are_followed_without_the_general_way(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, expected = torch.zeros(4), torch.zeros(4)
    plus, minus = torch.ones(4), -torch.ones(4)
    f = capture(branch)
    with torch.set_grad_enabled(grad):
        warmed(f, [(plus, kept), (minus, kept)])
        warmed(branch, [(plus, expected), (minus, expected)])

        def fail(*args: Any) -> None:
            raise AssertionError("the general way was taken")

        before = recordings(f).replays
        monkeypatch.setattr(dispatch, "guarded", fail)
        for x in (plus, minus, minus, plus, plus):
            assert bits(f(x, kept)) == bits(branch(x, expected))
            assert torch.is_grad_enabled() == grad
    assert bits(kept) == bits(expected)
    assert recordings(f).replays == before + 5


def test_value_without_a_recording_leaves_the_fast_path() -> None:
    """What the first segment wrote is undone, and the call goes the general way, once."""
    kept, expected = torch.zeros(4), torch.zeros(4)
    f = capture(branch)
    with torch.no_grad():
        for x in [torch.ones(4)] * 5 + [-torch.ones(4)] * 4 + [torch.ones(4)] * 2:
            assert bits(f(x, kept)) == bits(branch(x, expected))
            assert bits(kept) == bits(expected)
    assert recordings(f).recordings == 2
