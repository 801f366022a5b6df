"""What a body detached has a graph that nobody needs: a later write to what that has saved is no error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, recordings
from tests.support.regions import both, inputs, twins
from tests.support.regions import fresh as fresh

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Normalized(nn.Module):
    """Power iteration on a buffer that each call writes, as spectral normalization is written by hand."""

    def __init__(self, needs_it: bool) -> None:
        super().__init__()
        self.w, self.needs_it = nn.Parameter(torch.randn(6, 6)), needs_it
        self.u: Tensor
        self.register_buffer("u", torch.randn(6))

    @override
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(F.normalize(self.w @ self.u, dim=0))
        v = F.normalize(self.w.t() @ self.u, dim=0)
        out: Tensor = x @ self.w + (v if self.needs_it else v.detach())
        return out


@pytest.mark.parametrize("needs_it", [False, True])
def test_a_buffer_is_written_before_the_backward_pass(needs_it: bool) -> None:
    mine, theirs = twins(lambda: Normalized(needs_it))
    capture(mine)

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        loss = model(inputs(number, 3, 6)).sum() + model(inputs(number + 1, 3, 6)).square().sum()
        if needs_it:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            return []
        loss.backward()
        return [loss]

    both(step, mine, theirs)
    assert recordings(mine).replays >= 6
