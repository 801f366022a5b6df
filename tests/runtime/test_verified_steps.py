"""``verify=`` where the optimizer's step is an island: what it did in the replay stays, and it does not run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, recordings
from tests.support.training_twins import both, data, net


@pytest.mark.parametrize("verify", ["first", "always"])
def test_verified_steps(verify: str) -> None:
    """The body finds all as the island of the replay left it, and the island does not run again."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)

        def step(x: Tensor) -> Tensor:
            found: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            schedule.step()
            return found.detach()

        return wrap(step), lambda: [list(model.parameters()), optimizer.state_dict(), schedule.state_dict()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        mine = both(program, lambda number: (data(number),), verify=verify)
    assert recordings(mine).verifications > 0


@pytest.mark.parametrize("verify", ["first", "always"])
def test_operators_that_raise_in_a_verified_replay(verify: str) -> None:
    """What the body wrote before stays, as in eager code."""

    def program(wrap: Callable[[Any], Any]) -> Any:
        w = torch.tensor([0.3, -0.7, 1.1, 0.2])

        def function(x: Tensor, at: Tensor) -> Tensor:
            w.mul_(0.9)
            root: Tensor = torch.linalg.cholesky(at)  # raises on the host, too: a wrong index would end a GPU's context
            return root * x[:4] * w.sum()

        captured = wrap(function)

        def run(x: Tensor, at: Tensor) -> Any:
            try:
                return captured(x, at)
            except (IndexError, RuntimeError) as error:
                return type(error).__name__

        return run, lambda: w

    both(program, lambda number: (data(number), torch.eye(4) * (-1 if number % 5 in (2, 4) else 1 + number)),
         verify=verify)  # fmt: skip
