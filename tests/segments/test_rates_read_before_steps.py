"""The rate of a schedule is read before its step, which runs between two segments and changes it: where no recording
goes on after that, the body runs, and reads what was there before the step."""

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
    "once": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 10),
    "in turn": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1, 6), lr_scheduler.StepLR(optimizer, 8)], [6]
    ),
    "one after the other": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 6), lr_scheduler.StepLR(optimizer, 8)]
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore")
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def by_method(schedule: Any) -> Any:
    return schedule.get_last_lr()[0]


def by_attribute(schedule: Any) -> Any:
    return schedule._last_lr


def by_groups(schedule: Any) -> Any:
    optimizer = getattr(schedule, "optimizer", None) or schedule._schedulers[0].optimizer
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("rate_of", [by_method, by_attribute, by_groups])
def test_equals_eager(rate_of: Callable[[Any], Any], kind: Any, schedule: str) -> None:
    def make(wrap: Any) -> Any:
        learner: Any = net().to(DEVICE)
        optimizer = kind(learner.parameters(), 1e-2)
        scheduler = SCHEDULES[schedule](optimizer)

        def learn(x: Tensor) -> Any:
            rate = rate_of(scheduler)
            optimizer.zero_grad()
            loss = learner(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach(), rate

        return wrap(learn), lambda: [list(learner.parameters()), optimizer.state_dict(), scheduler.get_last_lr()]

    both(make, lambda number: (data(number),))
