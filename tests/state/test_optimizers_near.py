"""An optimizer's settings are part of the key only where the body takes a step with it, not where it only reaches
it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import DEVICE


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss_of(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x).square().mean()
        return found

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, x: Tensor) -> Tensor:
        loss = self.loss_of(x)
        loss.backward()
        self.update()
        return loss.detach()


def _beside(name: str, rates: list[float]) -> Any:
    mine, theirs = Trainer(), Trainer()
    run = capture(getattr(mine, name))
    for number, rate in enumerate(rates):
        values = []
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        for trainer, call in ((mine, run), (theirs, getattr(theirs, name))):
            trainer.optimizer.param_groups[0]["lr"] = rate
            loss = call(x)
            if loss.requires_grad:
                loss.backward()
                trainer.update()
            values.append([loss.detach(), *[p.detach().clone() for p in trainer.model.parameters()]])
        assert all(map(torch.equal, *values)), number
    return recordings(run)


def test_a_rate_that_changes_beside_a_loss() -> None:
    found = _beside("loss_of", [0.1 / (1 + number) for number in range(16)])
    assert found.recordings <= 4  # forward and backward
    assert found.replays >= 24


def test_a_rate_that_a_helper_reads() -> None:
    found = _beside("whole", [0.1] * 6 + [0.05] * 6 + [0.1] * 6)
    assert found.replays >= 6
