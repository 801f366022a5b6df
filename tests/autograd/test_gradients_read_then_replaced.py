"""A first backward pass adds to gradients of the last call, which are cleared then, before a second one makes new ones:
a replay must not write new ones over those that it still reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.runtime.test_decisions import Step, Wrap, _every_body_pays, twins  # noqa: F401
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda given: optim.SGD(given, 0.1, momentum=0.9),
    "Adam": lambda given: optim.Adam(given, 0.1),
    "fused Adam": lambda given: optim.Adam(given, 0.1, fused=True),
    "RMSprop": lambda given: optim.RMSprop(given, 0.1),
}


def searched(wrap: Wrap, make: Callable[[Any], optim.Optimizer], rate: float) -> Step:
    """As a differentiable architecture search: weights of operations on one batch, those of layers on another."""
    torch.manual_seed(0)
    a, state = nn.Parameter(torch.ones(2, device=DEVICE)), {"tau": 5.0}
    op, out = nn.Linear(4, 4, device=DEVICE), nn.Linear(4, 3, device=DEVICE)
    optimizer = make([a])

    def model(x: Tensor) -> Any:
        w = a / state["tau"]
        return out(w[0] * op(x) + w[1] * x)

    @wrap
    def search(x: Tensor, other: Tensor) -> Tensor:
        optimizer.zero_grad()
        model(other).pow(2).mean().backward()
        optimizer.step()
        op.zero_grad()
        out.zero_grad()
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        state["tau"] = max(0.5, state["tau"] * rate)
        return loss.detach()

    def step(n: int) -> Any:
        loss = search(torch.randn(6, 4, device=DEVICE), torch.randn(6, 4, device=DEVICE))
        return loss, state["tau"], [a, a.grad, *[one.grad for layer in (op, out) for one in layer.parameters()]]

    return step


def adversarial(wrap: Wrap, make: Callable[[Any], optim.Optimizer], rate: float) -> Step:
    """The generator's step leaves gradients in the critic, which its own step clears. Noise that anneals."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4, device=DEVICE), nn.Linear(4, 1, device=DEVICE)
    first, second, state = make(generator.parameters()), make(critic.parameters()), {"noise": 1.0}

    @wrap
    def train(z: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        first.zero_grad()
        fooled = -critic(generator(z) + state["noise"]).mean()
        fooled.backward()
        first.step()
        second.zero_grad()
        judged = (critic(generator(z).detach()) - critic(real)).mean()
        judged.backward()
        second.step()
        state["noise"] *= rate
        return fooled.detach(), judged.detach()

    def step(n: int) -> Any:
        losses = train(torch.randn(5, 3, device=DEVICE), torch.randn(5, 4, device=DEVICE))
        parameters = [*generator.parameters(), *critic.parameters()]
        return losses, state["noise"], parameters, [one.grad for one in parameters]

    return step


@pytest.mark.parametrize("rate", [1.0, 0.9])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("program", [searched, adversarial])
def test_gradients_that_are_read_then_replaced(program: Any, name: str, rate: float) -> None:
    with torch.enable_grad():
        replays = twins(lambda wrap: program(wrap, OPTIMIZERS[name], rate), 30)
    assert replays > 15 or rate < 1
