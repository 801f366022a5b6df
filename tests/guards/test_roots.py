"""Tensors that a weak reference or a method leads to."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE


class Kept(nn.Module):
    """Reaches its weight by a reference, as recurrent modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0, device=DEVICE))
        self.found = self.by_reference()

    def by_reference(self) -> list[Callable[[], Tensor]]:
        return [weakref.ref(self.weight)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x * self.found[0]()


class KeptByMethod(Kept):
    """Reaches its weight by a bound method."""

    @override
    def by_reference(self) -> list[Callable[[], Tensor]]:
        return [types.MethodType(_itself, self.weight)]


def _itself(value: Tensor) -> Tensor:
    return value * 1.0


@pytest.mark.parametrize("kind", [Kept, KeptByMethod])
def test_a_weight_behind_a_reference(kind: type[Kept]) -> None:
    """It is read where it is, and another one in its place shows in the next call."""
    eager, mine = kind(), kind()
    captured = capture(mine)
    x = torch.ones(4, device=DEVICE)
    with torch.no_grad():
        for step in range(8):
            if step == 5:
                for one in (eager, mine):
                    one.weight = nn.Parameter(torch.arange(4.0, device=DEVICE) + 7.0)
                    one.found[:] = one.by_reference()
            elif step % 2:
                for one in (eager, mine):
                    one.weight.add_(1.0)
            assert torch.equal(captured(x), eager(x)), step
    assert recordings(captured).replays >= 3, recordings(captured)
