"""Results that a body makes in inference mode, which its caller is not in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE


def inside(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return torch.mul(x, 2)


def of_two(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return torch.mul(x, 2), x[1:] * 3


@pytest.mark.one_in(4)
@pytest.mark.parametrize("numel", [3, 30_000])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("body", [inside, of_two])
def test_they_are_inference_tensors(body: Callable[[torch.Tensor], Any], keeps: bool, numel: int) -> None:
    captured, kept = capture(body), []
    for number in range(8):
        x = torch.full((numel,), float(number), device=DEVICE)
        result = captured(x)
        results = result if isinstance(result, tuple) else (result,)
        expected = body(x)
        for tensor, expected_tensor in zip(
            results, expected if isinstance(expected, tuple) else (expected,), strict=True
        ):
            assert tensor.is_inference()
            assert torch.equal(tensor, expected_tensor)
        if keeps:
            kept.append((number, results))
    for number, held in kept:
        assert held[0][0].item() == 2 * number
    assert recordings(captured).replays >= 4


@pytest.mark.parametrize("body", [inside, of_two])
def test_those_of_another_size_are_too(body: Callable[[torch.Tensor], Any]) -> None:
    """Outputs that are known to be kept are owned from a new size's first recording on, whose run gives copies."""
    captured, kept = capture(body), []
    for number in range(24):
        x = torch.full((3 + number // 8,), float(number), device=DEVICE)
        result = captured(x)
        for tensor in result if isinstance(result, tuple) else (result,):
            assert tensor.is_inference(), number
        kept.append(result)
    assert recordings(captured).recordings >= 3


@pytest.mark.filterwarnings("ignore:CG202")
def test_each_of_several_is_what_it_is() -> None:
    @capture
    def body(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            y = torch.mul(x, 2)
        return y, x * 3

    for _ in range(6):
        assert [tensor.is_inference() for tensor in body(torch.ones(3, device=DEVICE))] == [True, False]
