"""The function and arguments of a ``functools.partial``, which C code keeps: a change is seen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _plus(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x + factor


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("state", [(_plus, (), {"factor": 2.0}, {}), (_times, (), {"factor": 7.0}, {})])
def test_another_state(state: tuple[Any, ...], *, is_captured: bool) -> None:
    part: Any = functools.partial(_times, factor=2.0)

    def body(x: torch.Tensor) -> Any:
        return part(x)

    captured = capture(part if is_captured else body)
    with torch.no_grad():
        for number in range(10):
            if number == 5:
                part.__setstate__(state)
            x = torch.full((3,), float(number), device=DEVICE)
            assert torch.equal(captured(x), part(x))
    assert recordings(captured).replays >= 5


def test_a_number_on_it_that_changes() -> None:
    part: Any = functools.partial(_times, factor=2.0)
    part.scale = 3.0
    captured = capture(lambda x: part(x) * part.scale)
    with torch.no_grad():
        for number in range(10):
            if number == 5:
                part.scale = 4.0
            x = torch.full((3,), float(number), device=DEVICE)
            assert torch.equal(captured(x), x * 2.0 * part.scale)
    assert vars(part) == {"scale": 4.0}
