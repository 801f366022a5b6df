"""Steps of optimizers that run between segments, before the body compares what it read: where a replay stops behind
such a step, undone runs tell what a recording of the other way would do, and the step is done once all the same."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, config, recordings
from capture.tree import thread_trees
from tests.support.device import EXECUTES
from tests.support.training_twins import CALLS, both, data, net

Body = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class Trainer:
    """Its attributes are the state."""

    def __init__(self, optimizer: str) -> None:
        self.model: nn.Module = net()
        options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01, **options)
        self.best, self.bad, self.count = math.inf, 0, 0

    def fit(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> Any:
        optimizer = self.optimizer.state_dict()["state"]
        return [list(self.model.parameters()), optimizer, self.best, self.bad, self.count]


def best(s: Trainer, x: Tensor) -> float:
    value = s.fit(x).item()
    if value < s.best:
        s.best = value
    return value


def best_by_min(s: Trainer, x: Tensor) -> float:
    value = s.fit(x).item()
    s.best = min(s.best, value)
    return value


def patience(s: Trainer, x: Tensor) -> Tensor:
    loss = s.fit(x)
    if loss.item() < s.best:
        s.best, s.bad = loss.item(), 0
    else:
        s.bad += 1
    return loss.detach()


def twice_where_it_is_worse(s: Trainer, x: Tensor) -> float:
    value = s.fit(x).item()
    if value > s.best:
        value = s.fit(x).item()
    s.best = value
    return value


def of_an_array(s: Trainer, x: Any) -> float:
    loss = s.fit(torch.as_tensor(x))
    return 1.0 if (loss > 7).item() else float(loss.item())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("body", [best, best_by_min, patience, twice_where_it_is_worse, of_an_array])
def test_a_step_is_done_once(body: Body, optimizer: str) -> None:
    def program(wrap: Callable[[Any], Any]) -> Any:
        trainer = Trainer(optimizer)

        def step(x: Any) -> Any:
            return body(trainer, x)

        return wrap(step), trainer.state

    def arguments(number: int) -> tuple[Any, ...]:
        x = data(number)
        return (x.cpu().numpy().astype(np.float32) if body is of_an_array else x,)

    mine = both(program, arguments)
    if EXECUTES and body in (best, best_by_min):
        assert recordings(mine).replays > CALLS // 4
