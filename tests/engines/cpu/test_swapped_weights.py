"""``torch.utils.swap_tensors``, by which modules may convert their parameters, refuses tensors that others refer to:
recordings must hold no such reference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from capture import capture, recordings


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_weights_of_a_recorded_module_can_be_swapped(needs_grad: bool) -> None:
    with torch.device("cpu"):
        net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.ones(1, 3)
        captured, plain = capture(net), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    plain.load_state_dict(net.state_dict())

    def run(count: int) -> None:
        for _ in range(count):
            result, expected = captured(x), plain(x)
            assert torch.equal(result, expected)
            if needs_grad:
                result.sum().backward()

    with torch.set_grad_enabled(needs_grad):
        run(5)
        replays = recordings(captured).replays
        assert replays >= 3
        for weight, plain_weight in zip(net.parameters(), plain.parameters(), strict=True):
            changed = nn.Parameter(weight.detach() * 2)
            torch.utils.swap_tensors(weight, changed)
            with torch.no_grad():
                plain_weight.mul_(2)
        run(5)
        assert recordings(captured).replays > replays
