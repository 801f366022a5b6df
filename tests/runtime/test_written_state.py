"""State that a recording leaves in its pool and another one writes: gradients that are added up over calls."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capture import capture, recordings
from tests.support.device import DEVICE

EVERY, STEPS = 4, 32


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(5, 6).to(DEVICE), torch.randint(3, (5,)).to(DEVICE)


def apart(wrap: Callable[[Any], Any]) -> tuple[Callable[[int], Any], nn.Module]:
    """The step of the optimizer is no part of what adds."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @wrap
    def add(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(net(x), y) / EVERY
        loss.backward()
        return loss.detach()

    def step(number: int) -> Any:
        loss = add(*_batch(number))
        if number % EVERY == EVERY - 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, net


def inside(wrap: Callable[[Any], Any]) -> tuple[Callable[[int], Any], nn.Module]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @wrap
    def train(x: Tensor, y: Tensor, *, last: bool) -> Tensor:
        loss = functional.cross_entropy(net(x), y) / EVERY
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return lambda number: train(*_batch(number), last=number % EVERY == EVERY - 1), net


def buffers(wrap: Callable[[Any], Any]) -> tuple[Callable[[int], Any], nn.Module]:
    """A sum that is made anew by one function and added to by another."""
    net: Any = _net()
    net.total = None

    @wrap
    def begin(x: Tensor) -> None:
        with torch.no_grad():
            net.total = net(x)

    @wrap
    def add(x: Tensor) -> Tensor:
        with torch.no_grad():
            net.total.add_(net(x))
            return typing.cast(Tensor, net.total * 2)

    def step(number: int) -> Any:
        x, _ = _batch(number)
        return begin(x) if number % EVERY == 0 else add(x)

    return step, net


@pytest.mark.parametrize("program", [apart, inside, buffers])
def test_what_calls_add_up_is_replayed(program: Callable[..., tuple[Callable[[int], Any], nn.Module]]) -> None:
    made: list[Any] = []

    def captured(function: Any) -> Any:
        made.append(capture(function))
        return made[-1]

    (eager, theirs), (mine, ours) = program(lambda function: function), program(captured)
    for number in range(STEPS):
        expected, got = eager(number), mine(number)
        assert (got is None) == (expected is None), number
        assert got is None or torch.equal(got, expected), number
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other), number
            assert (one.grad is None) == (other.grad is None), number
            assert one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad)), number
    replays = sum(recordings(one).replays for one in made)
    assert replays >= STEPS // 2, [str(recordings(one)) for one in made]
