"""What is said of a function that gives up where modes vary, too."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from capture import CaptureWarning, capture
from tests.support.decorated import fresh as fresh


def test_autocast_is_on_in_some_of_the_calls() -> None:
    """Every call has a key of its own; the first ones have no autocast."""

    def body(x: Tensor, scale: float) -> Tensor:
        return torch.relu(x - 3) * float(str(scale + 1))  # Python reads it

    f = capture(body)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CaptureWarning)
        for number in range(60):
            x, is_on = torch.ones(4) * number, number % 2 == 1
            with torch.autocast(x.device.type, torch.bfloat16, enabled=is_on):
                assert torch.equal(f(x, number + 0.5), body(x, number + 0.5))
    text = "\n".join(str(one.message) for one in told)
    assert "CG905" not in text
    assert "autocast" in text
    assert "CG906" in text
