"""A body that reaches more state than guards are made for runs eagerly, and says so."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, recordings
from capture.guards.read_walk import MOST_OBJECTS

rows = [SimpleNamespace(weight=1.0, number=number) for number in range(2 * MOST_OBJECTS)]


@pytest.mark.slow
def test_a_data_set_in_reach_of_the_body_makes_it_eager_in_time() -> None:
    @capture
    def body(x: Tensor) -> Tensor:
        return x.mul(sum(float(one.weight) for one in rows[:10]))

    begin = time.perf_counter()
    with pytest.warns(CaptureWarning, match=r"CG110[^\n]*more than 50,000 objects"):
        body(torch.ones(3))
    for number in range(3):
        assert torch.equal(body(torch.ones(3) * number), torch.ones(3) * number * 10)
    assert time.perf_counter() - begin < 60
    assert recordings(body).recordings == 0
    rows[3].weight = 2.0
    try:
        assert torch.equal(body(torch.ones(3)), torch.ones(3) * 11)
    finally:
        rows[3].weight = 1.0
