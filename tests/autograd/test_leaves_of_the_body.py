"""Leaves that a body makes to differentiate for them: attributions, adversarial inputs, searches by gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, recordings
from tests.support.regions import bits, inputs
from tests.support.regions import fresh as fresh

STEPS = 9
Body = Callable[[nn.Module, Tensor], Tensor]


def saliency(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    model(x)[:, 0].sum().backward()
    assert x.grad is not None
    return x.grad.abs()


def fast_gradient_sign(model: nn.Module, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    F.mse_loss(model(leaf), torch.zeros_like(x)).backward()
    return (leaf + 0.1 * torch.sign(leaf.grad)).detach()  # type: ignore[arg-type]


def projected(model: nn.Module, x: Tensor) -> Tensor:
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        model(x + delta).square().sum().backward()
        assert delta.grad is not None
        delta.data = (delta + 0.1 * delta.grad.sign()).clamp(-0.2, 0.2)
        delta.grad.zero_()
    return (x + delta).detach()


def integrated(model: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for at in range(1, 4):
        leaf = (x * (at / 3)).detach().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).sum(), leaf)
        total += grad
    return x * total / 3


def searched(model: nn.Module, x: Tensor) -> Tensor:
    """A search by an optimizer that the body makes, as where a latent is fitted."""
    latent = nn.Parameter(torch.zeros_like(x))
    optimizer = torch.optim.SGD([latent], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(latent) - x).square().mean().backward()
        optimizer.step()
    return latent.detach()


def retained(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.sin(x.detach().requires_grad_())
    h.retain_grad()
    model(h).square().sum().backward()
    assert h.grad is not None
    return h.grad * h.detach()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("body", [saliency, fast_gradient_sign, projected, integrated, searched, retained])
def test_as_in_eager(body: Body, frozen: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).requires_grad_(not frozen)
    model.to(inputs(0).device)

    def run(x: Tensor) -> Tensor:
        return body(model, x)

    f, logs = capture(run), list[list[bytes]]()
    for call in (run, f):
        log = []
        model.zero_grad()
        for number in range(STEPS):
            log += [bits(call(inputs(number))), *[bits(parameter.grad) for parameter in model.parameters()]]
        logs.append(log)
    assert logs[0] == logs[1]
    counted = recordings(f)
    assert counted.replays >= 3, counted.findings
