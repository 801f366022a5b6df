"""Gradients of a result of a region that another of its results is made of: retained, hooked, and asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, recordings
from tests.support.observed import bits
from tests.support.regions import fresh as fresh
from tests.support.regions import inputs, kept, twins

STEPS = 12


class Features(nn.Module):
    """Gives what it computes, and the features that it computes that of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return self.b(h).square(), h


def retained(y: Tensor, h: Tensor) -> Any:
    h.retain_grad()
    y.mean().backward()
    return h.grad


def retained_and_used(y: Tensor, h: Tensor) -> Any:
    h.retain_grad()
    (y.mean() + h.square().sum()).backward()
    return h.grad


def retained_twice(y: Tensor, h: Tensor) -> Any:
    h.retain_grad()
    y.mean().backward(retain_graph=True)
    y.sum().backward()
    return h.grad


def hooked(y: Tensor, h: Tensor) -> Any:
    seen = list[Tensor]()
    h.register_hook(lambda grad: seen.append(grad.clone()))
    h.register_hook(lambda grad: grad * 0.5)
    y.mean().backward()
    return seen


def asked_for(y: Tensor, h: Tensor) -> Any:
    (grad,) = torch.autograd.grad(y.mean(), h, retain_graph=True)
    y.mean().backward()
    return grad


def hooked_at_the_end(y: Tensor, h: Tensor) -> Any:
    """No other result is made of this one, and replays go on."""
    y.register_hook(lambda grad: grad * 3)
    (y.mean() + h.sum()).backward()
    return y.detach()


def program(use: Callable[[Tensor, Tensor], Any], begin: int, net: Any, model: nn.Module) -> list[Any]:
    seen = list[Any]()
    for number in range(STEPS):
        model.zero_grad()
        y, h = net(inputs(number))
        if number < begin:
            (y.mean() + h.sum()).backward()
            used: Any = None
        else:
            used = use(y, h)
        seen.append((bits(y.detach()), bits(h.detach()), used, [kept(p.grad) for p in model.parameters()]))
    return seen


@pytest.mark.one_in(4)
@pytest.mark.parametrize("use", [retained, retained_and_used, retained_twice, hooked, asked_for])
def test_they_are_asked_for_from_the_first_call_on(use: Callable[[Tensor, Tensor], Any]) -> None:
    mine, theirs = twins(Features)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = program(use, 0, capture(mine), mine)
    assert bits(got) == bits(program(use, 0, theirs, theirs))
    said = [str(one.message) for one in told if issubclass(one.category, CaptureWarning)]
    assert any("CG501" in one and "another result is made of" in one for one in said)


@pytest.mark.parametrize("use", [retained, retained_and_used, retained_twice])
def test_they_are_asked_for_after_replays(use: Callable[[Tensor, Tensor], Any]) -> None:
    mine, theirs = twins(Features)
    net = capture(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = program(use, 6, net, mine)
    assert recordings(net).replays
    assert bits(got) == bits(program(use, 6, theirs, theirs))


def test_hooks_on_the_last_result_do_not_stop_replays() -> None:
    mine, theirs = twins(Features)
    net = capture(mine)
    got = program(hooked_at_the_end, 0, net, mine)
    assert bits(got) == bits(program(hooked_at_the_end, 0, theirs, theirs))
    assert recordings(net).replays
