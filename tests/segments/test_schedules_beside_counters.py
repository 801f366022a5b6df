"""Schedules of learning rates that take a step in the body, beside a counter of which the body asks something: their
steps run between segments and can be undone, so the counter is told by the answers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from capture import CaptureWarning, config, recordings
from capture.tree import thread_trees
from tests.support.device import EXECUTES
from tests.support.training_twins import CALLS, both, data, net

RAMP, SHIFT, told = 20, [1], list[int]()


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def by_a_list(epoch: int) -> float:
    return 1 / (epoch + SHIFT[0])


def by_math(epoch: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(epoch, RAMP) / RAMP))


def telling(epoch: int) -> float:
    told.append(epoch)
    return 1 / (1 + epoch)


def ramp(optimizer: Any, length: int = RAMP) -> Any:
    def factor(epoch: int) -> float:
        return float(min(1.0, (epoch + 1) / length)) if epoch < 2 * length else 0.5

    return schedules.LambdaLR(optimizer, factor)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "a function with a cell": ramp,
    "a function of math": lambda optimizer: schedules.LambdaLR(optimizer, by_math),
    "a partial": lambda optimizer: schedules.LambdaLR(optimizer, functools.partial(pow, 0.9)),
    "a product": lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda _: 0.97),
    "steps": lambda optimizer: schedules.StepLR(optimizer, 15, 0.5),
    "milestones": lambda optimizer: schedules.MultiStepLR(optimizer, [6, 21], 0.5),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.99),
    "linear": lambda optimizer: schedules.LinearLR(optimizer, 0.1, total_iters=25),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, CALLS),
    "warm restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 7),
    "one cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.02, total_steps=2 * CALLS),
}
MOVING_SELDOM = (SCHEDULES["steps"], SCHEDULES["milestones"])
"""Their settings stay for many calls, so that steps of SGD are recorded, and the schedule counts in the body."""
UNDONE_BY_NOBODY: dict[str, Callable[[Any], Any]] = {
    "a list": lambda optimizer: schedules.LambdaLR(optimizer, by_a_list),
    "what it tells": lambda optimizer: schedules.LambdaLR(optimizer, telling),
}


class Trainer:
    def __init__(self, optimizer: str, schedule: Callable[[Any], Any]) -> None:
        self.model: nn.Module = net()
        options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01, **options)
        self.schedule = schedule(self.optimizer)
        self.step = 0

    def fit(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def state(self) -> Any:
        groups = [{name: one for name, one in group.items() if name != "params"} for group in self.groups()]
        own = {name: one for name, one in vars(self.schedule).items() if type(one) in (int, float, list)}
        own.pop("lr_lambdas", None)
        return [list(self.model.parameters()), self.optimizer.state_dict()["state"], groups, own, self.step]

    def groups(self) -> Any:
        return self.optimizer.param_groups


def warmed_up(s: Trainer, x: Tensor) -> Tensor:
    loss = s.fit(x)
    if s.step < 10:
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    s.optimizer.step()
    s.schedule.step()
    s.step += 1
    return loss.detach()


def every_fourth(s: Trainer, x: Tensor) -> float:
    loss = s.fit(x)
    s.optimizer.step()
    s.step += 1
    if s.step % 4 == 0:
        s.schedule.step()
    return loss.item()


def program(body: Any, optimizer: str, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def of(wrap: Callable[[Any], Any]) -> Any:
        trainer = Trainer(optimizer, schedule)

        def step(x: Tensor) -> Any:
            return body(trainer, x)

        return wrap(step), trainer.state

    return of


@pytest.mark.one_in(7)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("body", [warmed_up, every_fourth])
def test_replayed(body: Any, optimizer: str, schedule: Callable[[Any], Any]) -> None:
    mine = both(program(body, optimizer, schedule), lambda number: (data(number),))
    is_left = schedule in MOVING_SELDOM if optimizer == "SGD" else schedule is SCHEDULES["one cycle"]
    reads = body is every_fourth and not EXECUTES  # segments that are captured are not compared with others
    assert recordings(mine).replays > CALLS // 4 or is_left or reads


@pytest.mark.parametrize("schedule", UNDONE_BY_NOBODY.values(), ids=UNDONE_BY_NOBODY)
def test_functions_that_read_or_leave_more(schedule: Callable[[Any], Any]) -> None:
    both(program(warmed_up, "Adam", schedule), lambda number: (data(number),))


def test_each_step_is_told_once() -> None:
    told.clear()
    schedule = UNDONE_BY_NOBODY["what it tells"]
    both(program(warmed_up, "SGD", schedule), lambda number: (data(number),))
    assert sorted(told) == sorted([*range(CALLS + 1), *range(CALLS + 1)])


def test_a_counter_that_the_function_reads() -> None:
    """The function of the schedule sees what the body changed in a cell before its step."""

    def of(wrap: Callable[[Any], Any]) -> Any:
        model, calls = net(), 0
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = schedules.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch + calls))

        def step(x: Tensor) -> Tensor:
            nonlocal calls
            loss: Tensor = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            calls += 2
            schedule.step()
            return loss.detach() * 2 if calls % 8 == 0 else loss.detach()

        return wrap(step), lambda: [list(model.parameters()), schedule.get_last_lr(), calls]

    both(of, lambda number: (data(number),))
