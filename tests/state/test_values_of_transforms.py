"""What a function under ``torch.vmap`` leaves in Python state has no memory of its own once that is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.device import DEVICE


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("place", ["in a dict", "in a list", "on an object"])
def test_a_value_of_a_transform_is_kept(place: str) -> None:
    class Holder:
        last: Any = None

    w, in_dict, in_list, holder = torch.randn(3, 3, device=DEVICE), dict[str, Tensor](), list[Tensor](), Holder()

    def one(x: Tensor) -> Tensor:
        if place == "in a dict":
            in_dict["last"] = x * 2
        elif place == "in a list":
            in_list[:] = [x * 2]
        else:
            holder.last = x * 2
        return (x @ w).tanh()

    def mapped(x: Tensor) -> Tensor:
        return torch.vmap(one)(x)

    captured = capture(mapped)
    for _ in range(8):
        x = torch.randn(4, 3, device=DEVICE)
        assert torch.equal(captured(x), mapped(x))
    assert "CG905" not in [finding.code for finding in recordings(captured).findings]
