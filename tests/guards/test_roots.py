"""Tensors that a weak reference or a method leads to, and objects that are named as a root is."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

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

    def by_reference(self) -> list[Callable[[], Any]]:
        return [weakref.ref(self.weight)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.found[0]()
        return y


class KeptByMethod(Kept):
    """Reaches its weight by a bound method."""

    @override
    def by_reference(self) -> list[Callable[[], Any]]:
        return [types.MethodType(_itself, self.weight)]


def _itself(value: Tensor) -> Tensor:
    return value * 1.0


@pytest.mark.parametrize("kind", [Kept, KeptByMethod])
def test_a_weight_behind_a_reference(kind: type[Kept]) -> None:
    """The weight is read where it is, and another one in its place shows in the next call."""
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


def test_a_variable_that_is_named_function() -> None:
    """A walk begins at the captured function under that name, too."""
    function = nn.Linear(4, 4).to(DEVICE)

    def body(x: Tensor) -> Tensor:
        y: Tensor = function(x)
        return y.tanh()

    captured = capture(body)
    x = torch.ones(4, device=DEVICE)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(captured(x), body(x))
        assert recordings(captured).replays >= 2, recordings(captured)
        function = nn.Linear(4, 4).to(DEVICE)
        assert torch.equal(captured(x), body(x))
