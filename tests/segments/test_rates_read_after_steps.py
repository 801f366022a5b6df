"""The rate of an optimizer is read after the step of a schedule, which runs between two segments and changes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from capture import CaptureWarning, config
from capture.tree import thread_trees
from tests.support.device import DEVICE
from tests.support.training_twins import both, data, net

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "every fifth": lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.9),
    "at two steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [9, 21], 0.5),
    "in each": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
}


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class Learner:
    def __init__(self, kind: Any, schedule: str) -> None:
        self.net: Any = net().to(DEVICE)
        self.optimizer = kind(self.net.parameters(), 1e-3)
        self.schedule = SCHEDULES[schedule](self.optimizer)

    def learn(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    def state(self) -> Any:
        return [list(self.net.parameters()), self.optimizer.state_dict(), self.schedule.state_dict()["_last_lr"]]


def multiplied(learner: Learner, x: Tensor) -> Any:
    loss = learner.learn(x)
    learner.schedule.step()
    return loss * learner.optimizer.param_groups[0]["lr"]


def given_back(learner: Learner, x: Tensor) -> Any:
    loss = learner.learn(x)
    learner.schedule.step()
    return loss, learner.optimizer.param_groups[0]["lr"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("body", [multiplied, given_back])
def test_equals_eager(body: Callable[[Learner, Tensor], Any], kind: Any, schedule: str) -> None:
    def make(wrap: Any) -> Any:
        learner = Learner(kind, schedule)
        return wrap(lambda x: body(learner, x)), learner.state

    both(make, lambda number: (data(number),))
