"""The dicts in which a module keeps its parameters, buffers and submodules, replaced as a whole: by an assignment, by
``__setstate__``, by a sharding library. A recording that followed the dicts that were there would go on with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.observed import bits, x_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.norm = nn.BatchNorm1d(2)
        self.weight = nn.Parameter(torch.ones(2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.parts(x)) * self.weight
        return out


def scaled(table: dict[str, Any], by: float) -> dict[str, Any]:
    return {name: None if one is None else nn.Parameter(one.detach() * by) for name, one in table.items()}


def own_parameters(net: Net, by: float) -> None:
    net._parameters = scaled(net._parameters, by)


def parameters_of_a_part(net: Net, by: float) -> None:
    net.parts[0]._parameters = scaled(net.parts[0]._parameters, by)


def another_class_of_dict(net: Net, by: float) -> None:
    net.parts[0]._parameters = OrderedDict(scaled(net.parts[0]._parameters, by))


def beside_setattr(net: Net, by: float) -> None:
    object.__setattr__(net.parts[2], "_parameters", scaled(net.parts[2]._parameters, by))


def by_setstate(net: Net, by: float) -> None:
    part = net.parts[0]
    part.__setstate__({**part.__dict__, "_parameters": scaled(part._parameters, by)})


def by_update(net: Net, by: float) -> None:
    net.parts[0].__dict__.update(_parameters={"weight": nn.Parameter(torch.full((5, 4), by)), "bias": None})


def all_attributes(net: Net, by: float) -> None:
    net.parts[0].__dict__ = {**net.parts[0].__dict__, "_parameters": scaled(net.parts[0]._parameters, by)}


def buffers(net: Net, by: float) -> None:
    counted = {
        name: one if one is None or not one.is_floating_point() else one * by for name, one in net.norm._buffers.items()
    }
    net.norm._buffers = counted


def submodules(net: Net, by: float) -> None:
    net.parts._modules = {**net.parts._modules, "1": nn.ReLU() if by > 1 else nn.Sigmoid()}


CHANGES = [
    own_parameters, parameters_of_a_part, another_class_of_dict, beside_setattr, by_setstate, by_update,
    all_attributes, buffers, submodules,
]  # fmt: skip


def run(wrap: Callable[[Any], Any], change: Callable[[Net, float], None], how: str) -> tuple[Any, list[Any]]:
    net = Net()
    net.eval()

    def step(x: Tensor) -> Any:
        for one in net.parameters():
            one.grad = None
        loss = net(x).square().sum()
        loss.backward()
        return loss.detach()

    called, seen = wrap(step if how == "whole step" else net), []
    for number in range(16):
        if number in (5, 10):
            change(net, 1.5 if number == 5 else 0.5)
        x = x_of(number)
        with torch.set_grad_enabled(how != "no grad"):
            out = called(x)
        if how == "region":
            for one in net.parameters():
                one.grad = None
            out.sum().backward()
        seen.append([out, *[None if one.grad is None else one.grad.clone() for one in net.parameters()]])
    return called, seen


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["no grad", "region", "whole step"])
@pytest.mark.parametrize("change", CHANGES)
def test_tables_that_are_replaced(change: Callable[[Net, float], None], how: str) -> None:
    thread_trees.forget_trees()
    with config.patch(cache=False):
        _, expected = run(lambda called: called, change, how)
        called, seen = run(capture, change, how)
    assert bits(seen) == bits(expected)
    assert recordings(called).replays >= 4, recordings(called)


def test_a_body_that_replaces_them() -> None:
    class Counting(nn.Module):
        sum: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sum", torch.zeros(4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self._buffers = {"sum": self.sum + x.sum(0)}
            return x * self.sum

    thread_trees.forget_trees()
    one, other = Counting(), Counting()
    capture(other, silence=["CG204", "CG205", "CG401", "CG402"])
    with config.patch(cache=False), torch.no_grad():
        for number in range(8):
            if number == 5:
                one._buffers, other._buffers = {"sum": torch.ones(4)}, {"sum": torch.ones(4)}
            assert bits([other(x_of(number)), other.sum]) == bits([one(x_of(number)), one.sum])
