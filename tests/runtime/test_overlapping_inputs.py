"""Arguments and gradients whose own elements share memory: each replay reads this call's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from capture import capture, mark_step_begin, recordings
from tests.support.rows import rand, same

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "one number for all": lambda x: x[0].expand(5, 4),
    "one row for all": lambda x: x[:4].expand(5, 4),
    "windows": lambda x: x.as_strided((5, 4), (2, 1)),
    "windows, later in the storage": lambda x: x.as_strided((3, 4), (2, 1), 3),
    "with gaps": lambda x: x[::3].expand(2, 8),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arguments_that_overlap_themselves(form: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.cat([x.flatten(), x[1:].flatten()]).clone()

    mine = capture(body)
    for number in range(6):
        values = rand(24, seed=number)
        x = form((values > 0) if dtype is torch.bool else (values * 9).to(dtype))
        mark_step_begin()
        same(mine(x), body(x))
    assert recordings(mine).replays >= 3


def test_arguments_that_overlap_one_another() -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return x.flatten() + y.flatten()

    mine = capture(body)
    for number in range(6):
        values = rand(24, seed=number)
        x, y = values.as_strided((5, 4), (2, 1)), values.as_strided((5, 4), (1, 2), 2)
        mark_step_begin()
        same(mine(x, y), body(x, y))
    assert recordings(mine).replays >= 3


@pytest.mark.parametrize("loss", [Tensor.sum, Tensor.mean, lambda y: y.sum(0)[1]], ids=["sum", "mean", "a column"])
def test_gradients_that_are_one_number(loss: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    eager, mine = nn.Linear(4, 3), nn.Linear(4, 3)
    mine.load_state_dict(eager.state_dict())
    captured = capture(mine)
    for number in range(8):
        x, factor = rand(5, 4, seed=number), number - 2.5
        for module in (eager, captured):
            module.zero_grad()
            (loss(module(x)) * factor).backward()
        mark_step_begin()
        for ours, theirs in zip(mine.parameters(), eager.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            same(ours.grad, theirs.grad)
    assert recordings(captured).replays >= 8
