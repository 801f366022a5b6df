"""A run that was undone, and a capture that wrote nothing, leave tensors' version counters as they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, config, recordings
from tests.support.device import DEVICE


class Model(nn.Module):
    seen: Tensor

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        generator = torch.Generator(device=DEVICE).manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3, 5, generator=generator, device=DEVICE))
        self.register_buffer("seen", torch.zeros(5, device=DEVICE))
        self.optimizer = getattr(torch.optim, optimizer)([self.weight], lr=0.01)
        self.step = 0


@torch.no_grad()
def counted(s: Model, x: Tensor) -> Any:
    s.step += 1
    s.seen.mul_(0.9).add_((x @ s.weight).mean(0), alpha=0.1 * s.step)
    return s.seen.sum()


def trained(s: Model, x: Tensor) -> Any:
    loss = (x @ s.weight).square().mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.detach()


def trained_every_third(s: Model, x: Tensor) -> Any:
    loss = trained(s, x)
    s.step += 1
    if s.step % 3 == 0:
        s.seen.copy_(s.weight.detach().mean(0))
    return loss


@torch.no_grad()
def argument_written(s: Model, x: Tensor) -> Any:
    s.step += 1
    x.mul_(0.5).add_(s.step)
    return x @ s.weight


BODIES = [counted, trained, trained_every_third, argument_written]


@pytest.mark.parametrize("how", ["copy", "bind"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("body", BODIES)
def test_versions_are_those_of_eager(body: Callable[[Model, Tensor], Any], optimizer: str, how: Any) -> None:
    """A copy of an argument is written back once a replay, however often the body writes it: those are left out. So is
    what torch writes for many tensors at once on a GPU: it counts less there than a watch does."""
    mine, eager = Model(optimizer), Model(optimizer)

    def step(x: Tensor) -> Any:
        return body(mine, x)

    def theirs(x: Tensor) -> Any:
        return body(eager, x)

    function: Any = capture(step, inputs=how)
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False):
        warnings.simplefilter("ignore", CaptureWarning)
        for call in range(24):
            found = []
            for model, run in ((mine, function), (eager, theirs)):
                x = torch.linspace(-1, call, 12, device=DEVICE).view(4, 3)
                result = run(x)
                state = list[Any](model.optimizer.state.get(model.weight, {}).values() if DEVICE.type == "cpu" else ())
                tensors = [*([x] if how == "bind" else []), model.weight, model.seen, model.weight.grad, *state]
                found.append([result, [one._version for one in tensors if isinstance(one, Tensor)]])
            torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert recordings(function).replays >= 6
