"""Tensors with a graph that a module leaves beside its results: losses on attributes, features that hooks keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits

KEPT: dict[str, Any] = {}


class Net(nn.Module):
    aux: Any

    def __init__(self, leave: Leave) -> None:
        super().__init__()
        self.first, self.last, self.aux, self.leave = nn.Linear(3, 4), nn.Linear(4, 2), None, leave
        self.table: dict[str, Any] = {}
        self.rows: list[Any] = []

    @override
    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        y = self.last(h)
        return self.leave(self, h, y)


Leave = Callable[[Net, Tensor, Tensor], Any]


def put(net: Net, value: Any) -> None:
    net.aux = value


def on_attribute(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux = h.abs().mean()
    return y


def in_a_dict(net: Net, h: Tensor, y: Tensor) -> Any:
    net.table["h"] = h * 2
    return y


def in_a_global(net: Net, h: Tensor, y: Tensor) -> Any:
    KEPT["h"] = net.aux = h * 2
    return y, h.detach()


def the_result_itself(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux = y
    return y


def two_of_them(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux, net.table["norm"] = h.norm(), y.norm()
    return y


def alone(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux = y.square().mean()


def from_the_last(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux = h * 2 if net.aux is None else net.aux * 0.5 + h
    return y


def from_the_last_detached(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux = h * 2 if net.aux is None else net.aux.detach() * h
    return y


def appended(net: Net, h: Tensor, y: Tensor) -> Any:
    net.rows.append(h.mean())
    return y


def a_view(net: Net, h: Tensor, y: Tensor) -> Any:
    net.aux = y[0]
    return y


REPLAYED: list[Leave] = [on_attribute, in_a_dict, in_a_global, the_result_itself, two_of_them, alone]
EAGER: list[Leave] = [from_the_last, from_the_last_detached, appended, a_view]


def left(net: Net) -> list[Tensor]:
    return [one for one in (net.aux, *net.table.values(), *KEPT.values(), *net.rows) if one is not None]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("leave", [*REPLAYED, *EAGER], ids=lambda one: one.__name__)
@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.filterwarnings("ignore:CG501:capture.CaptureWarning")
def test_left_with_a_graph(leave: Leave, *, detaches: bool) -> None:
    """``detaches``: the tensors in state are detached after each step; else they keep the graph of the step before."""
    told: list[list[Any]] = []
    replays = 0
    for is_captured in (True, False):
        KEPT.clear()
        torch.manual_seed(0)
        net = Net(leave).to(DEVICE)
        forward = capture(net) if is_captured else net
        told.append([])
        for seed in range(10):
            torch.manual_seed(seed)
            x = torch.randn(2, 3, device=DEVICE)
            output = forward(x)
            results = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            ends = list({id(tensor): tensor for tensor in (*results, *left(net)) if tensor.requires_grad}.values())
            total = torch.stack([end.square().sum() * (at + 1) for at, end in enumerate(ends)]).sum()
            net.zero_grad()
            total.backward(retain_graph=leave is from_the_last or leave is appended)
            flags = [(tensor.requires_grad, tensor.is_leaf, bits(tensor)) for tensor in (*results, *left(net))]
            told[-1].append((bits(total), flags, [bits(parameter.grad) for parameter in net.parameters()]))
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.data = parameter - 0.1 * parameter.grad if parameter.grad is not None else parameter.data
            if detaches:
                net.aux = net.aux if net.aux is None else net.aux.detach()
        replays = recordings(forward).replays if is_captured else replays
    assert told[0] == told[1]
    assert (replays >= 4) == (leave in REPLAYED)
