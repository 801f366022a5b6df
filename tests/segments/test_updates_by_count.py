"""Updates of actors and critics that a count of steps leads: the policy in every second step, the targets in others,
beside the steps of several optimizers, and of distributions whose code computes with ``math``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from capture import CaptureWarning, config, recordings
from capture.tree import thread_trees
from tests.support.training_twins import CALLS, both, data


@pytest.fixture(autouse=True, params=[True, False], ids=["checked", "unchecked"])
def _every_body_pays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With distributions that check their arguments, which the host reads, and without: torch's compiler turns that off
    for all of a process."""
    thread_trees.forget_trees()
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", request.param)
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.enable_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


class Learner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor, self.critic = net(4, 2), net(5, 1)
        self.target = copy.deepcopy(self.critic)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), 1e-3)
        self.of_alpha = torch.optim.Adam([self.log_alpha], 1e-3)
        self.count, self.alpha = 0, 1.0

    def acts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.actor(x).chunk(2, -1)
        normal = Normal(mean, spread.tanh().exp())
        drawn = normal.rsample()
        return torch.tanh(drawn), normal.log_prob(drawn) - 2 * (math.log(2) - drawn - F.softplus(-2 * drawn))

    def learn(self, x: Tensor, count: int) -> Tensor:
        with torch.no_grad():
            act, chance = self.acts(x)
            wanted = x.sum(1, keepdim=True) + 0.9 * (self.target(torch.cat([x, act], 1)) - self.alpha * chance)
        loss = F.mse_loss(self.critic(torch.cat([x, act], 1)), wanted)
        self.of_critic.zero_grad()
        loss.backward()
        self.of_critic.step()
        if count % 2 == 0:
            act, chance = self.acts(x)
            of_actor = (self.alpha * chance - self.critic(torch.cat([x, act], 1))).mean()
            self.of_actor.zero_grad()
            of_actor.backward()
            self.of_actor.step()
        if count % 3 == 0:
            with torch.no_grad():
                for own, target in zip(self.critic.parameters(), self.target.parameters(), strict=True):
                    target.copy_(0.1 * own + 0.9 * target)
        return loss.detach()

    def temper(self, x: Tensor) -> None:
        with torch.no_grad():
            _, chance = self.acts(x)
        loss = (-self.log_alpha.exp() * (chance - 1)).mean()
        self.of_alpha.zero_grad()
        loss.backward()
        self.of_alpha.step()

    def state(self) -> Any:
        modules = (self.actor, self.critic, self.target)
        weights = [list(module.parameters()) for module in modules]
        optimizers = [one.state_dict() for one in (self.of_actor, self.of_critic, self.of_alpha)]
        return [weights, optimizers, self.log_alpha, self.count, self.alpha]


def of_an_argument(wrap: Any) -> Any:
    learner, counts = Learner(), iter(range(CALLS))
    learn = wrap(lambda x, count: learner.learn(x, count))
    return lambda x: learn(x, next(counts)), learner.state


def of_an_attribute(wrap: Any) -> Any:
    learner = Learner()

    def learn(x: Tensor) -> Tensor:
        learner.count += 1
        return learner.learn(x, learner.count)

    return wrap(learn), learner.state


def counted_by_the_caller(wrap: Any) -> Any:
    learner = Learner()
    learn = wrap(lambda x: learner.learn(x, learner.count))

    def run(x: Tensor) -> Any:
        learner.count += 1
        return learn(x)

    return run, learner.state


def with_a_temperature(wrap: Any) -> Any:
    """What the host read of it counts in the calls after."""
    learner = Learner()

    def learn(x: Tensor) -> Tensor:
        learner.count += 1
        loss = learner.learn(x, learner.count)
        if learner.count % 2 == 0:
            learner.temper(x)
            learner.alpha = learner.log_alpha.exp().item()
        return loss

    return wrap(learn), learner.state


PROGRAMS: list[Callable[[Any], Any]] = [of_an_argument, of_an_attribute, counted_by_the_caller, with_a_temperature]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_replayed(program: Callable[[Any], Any]) -> None:
    mine = both(program, lambda number: (data(number),))
    assert recordings(mine).replays > CALLS // 4 or program is with_a_temperature
