"""A recording tries ``out=`` forms of operators; such a try writes nothing but its result."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from capture import capture, recordings
from tests.support.regions import bits


def test_a_form_that_wants_a_larger_result_writes_beside_nothing() -> None:
    """``mse_loss(out=...)`` resizes its result to hold all differences, which is refused. The refused tensor may keep
    that shape on the memory of one number, and operators that read it are tried next."""

    def body(a: Tensor, b: Tensor) -> list[Tensor]:
        kept = [a[0, :4] * k for k in range(40)]
        for place in (35, 30, 20, 10, 5, 3):  # holes, in which what follows comes to lie
            del kept[place]
        loss = 1e3 * F.mse_loss(a, b)
        return [*kept, loss, 2 - loss]

    captured = capture(body)
    with torch.no_grad():
        for number in range(6):
            a, b = (torch.randn(8, 8, generator=torch.Generator().manual_seed(number + seed), device="cpu")
                    for seed in (0, 100))  # fmt: skip
            assert [*map(bits, captured(a, b))] == [*map(bits, body(a, b))], number
    assert recordings(captured).replays >= 3
