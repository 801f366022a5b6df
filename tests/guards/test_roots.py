"""Tensors reached through a weak reference or a bound method, and a closure variable with the name of a root."""

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
    """The weight is read at its place; another weight there shows in the next call."""
    eager, mine = kind(), kind()
    captured = capture(mine)
    x = torch.ones(4, device=DEVICE)
    with torch.no_grad():
        for step in range(8):
            if step == 5:
                for module in (eager, mine):
                    module.weight = nn.Parameter(torch.arange(4.0, device=DEVICE) + 7.0)
                    module.found[:] = module.by_reference()
            elif step % 2:
                for module in (eager, mine):
                    module.weight.add_(1.0)
            assert torch.equal(captured(x), eager(x)), step
    assert recordings(captured).replays >= 3, recordings(captured)


def test_a_variable_that_is_named_function() -> None:
    """``function`` is also the name of the root at which walks through the captured function begin."""
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
