"""A tensor that is the key of a dict, as optimizers keep state, cannot be bound to another tensor of equal kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.trainers import bits
from tests.support.trainers import fresh as fresh

LOOKED_UP: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "key of a dict": lambda _, first, __: ({first: 0.5}, lambda table, one: table.get(one, 3.0)),
    "key that is there later": lambda _, __, other: ({other: 0.5}, lambda table, one: table.get(one, 3.0)),
    "member of a set": lambda _, first, __: ({first}, lambda table, one: 0.5 if one in table else 3.0),
    "member of a frozen set": lambda _, first, __: (
        frozenset([first]),
        lambda table, one: 0.5 if one in table else 3.0,
    ),
    "number": lambda _, first, __: ({id(first): 0.5}, lambda table, one: table.get(id(one), 3.0)),
    "hash": lambda _, first, __: ({hash(first): 0.5}, lambda table, one: table.get(hash(one), 3.0)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", LOOKED_UP)
def test_another_parameter_is_looked_up_anew(kind: str) -> None:
    net = nn.Linear(3, 2).to(DEVICE)
    first, second = net.weight, nn.Parameter(net.weight.detach().clone())
    table, get = LOOKED_UP[kind](net, first, second)

    def body(x: Tensor) -> Tensor:
        y: Tensor = net(x) * get(table, net.weight)
        return y

    function = capture(body)
    x = torch.randn(4, 3, device=DEVICE)
    with torch.no_grad():
        for weight in (first, second, first):
            net.weight = weight
            for _ in range(5):
                assert bits(function(x)) == bits(body(x))
    assert recordings(function).replays >= 6, recordings(function)


@pytest.mark.parametrize("kind", [set, list, dict.fromkeys])
def test_a_container_that_gets_another_member(kind: Any) -> None:
    net = nn.Linear(3, 2).to(DEVICE)
    table = kind([net.weight])

    def body(x: Tensor) -> Tensor:
        y: Tensor = net(x) * (0.5 if any(one is net.weight for one in table) else 3.0)
        return y

    function = capture(body)
    x = torch.randn(4, 3, device=DEVICE)
    with torch.no_grad():
        for weight in (net.weight, nn.Parameter(net.weight.detach().clone()), net.weight):
            table.clear()
            for add in (
                getattr(table, "add", None),
                getattr(table, "append", None),
                getattr(table, "setdefault", None),
            ):
                if add is not None:
                    add(weight)
            for _ in range(5):
                assert bits(function(x)) == bits(body(x))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_new_parameter_has_no_state_of_the_one_before(optimizer: str) -> None:
    """A parameter is replaced in the optimizer's list: the old one's state stays in the optimizer and is not used."""

    def training(wrap: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE)
        steps = OPTIMIZERS[optimizer](net.parameters())

        def step(x: Tensor) -> Tensor:
            steps.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            steps.step()
            return loss.detach()

        return wrap(step), net, steps

    (step, net, steps), (eager, its_net, its_steps) = training(capture), training(lambda function: function)
    for number in range(24):
        if number in (8, 16):
            for layers, its in ((net, steps), (its_net, its_steps)):
                layers[0].weight = nn.Parameter(torch.full((4, 3), 0.1 * number, device=DEVICE))
                its.param_groups[0]["params"][:] = list(layers.parameters())
        torch.manual_seed(number)
        x = torch.randn(5, 3, device=DEVICE)
        assert bits(step(x)) == bits(eager(x)), number
        assert [*map(bits, net.parameters())] == [*map(bits, its_net.parameters())], number
        assert len(steps.state) == len(its_steps.state)
    assert recordings(step).replays >= 10, recordings(step)


def test_an_optimizer_that_wraps_another_one_and_has_no_groups() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        @override
        def step(self) -> None:  # type: ignore[override]
            self.inner.step()

        @override
        def zero_grad(self) -> None:  # type: ignore[override]
            self.inner.zero_grad()

    def training(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(DEVICE)
        steps = Wrapper(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

        def step(x: Tensor) -> Tensor:
            steps.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            steps.step()
            return loss.detach()

        return wrap(step), net

    (step, net), (eager, its_net) = training(capture), training(lambda function: function)
    for number in range(10):
        x = torch.full((5, 3), 0.1 * number, device=DEVICE)
        assert bits(step(x)) == bits(eager(x))
        assert [*map(bits, net.parameters())] == [*map(bits, its_net.parameters())]
    assert recordings(step).replays >= 5
