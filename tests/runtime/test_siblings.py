"""Recordings of one function at several shapes share what they know of its state; each follows it by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.support.device import DEVICE
from tests.support.rows import same

SIZE = 8
BATCHES = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


class Net(nn.Module):
    """Two layers, a buffer, a parameter that is None, and a list of further modules that nothing registers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(SIZE))
        self.extra: nn.Parameter | None
        self.register_parameter("extra", None)
        self.more = [nn.Linear(SIZE, SIZE).to(DEVICE)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x)) * self.scale
        x = self.more[0](self.two(x))
        return x if self.extra is None else x + self.extra


def inputs() -> list[Tensor]:
    return [torch.rand(batch, SIZE, device=DEVICE) for batch in BATCHES]


def replace_weight(net: Net) -> None:
    net.one.weight = nn.Parameter(torch.rand(SIZE, SIZE, device=DEVICE))


def replace_module(net: Net) -> None:
    net.two = nn.Linear(SIZE, SIZE).to(DEVICE)


def replace_hidden_module(net: Net) -> None:
    net.more[0] = nn.Linear(SIZE, SIZE).to(DEVICE)


def replace_buffer(net: Net) -> None:
    net.scale = net.scale * 3


def write_buffer(net: Net) -> None:
    net.scale.mul_(-2)


def tie(net: Net) -> None:
    net.two.weight = net.one.weight


def give_parameter(net: Net) -> None:
    net.extra = nn.Parameter(torch.rand(SIZE, device=DEVICE))


def add_hook(net: Net) -> None:
    net.one.register_forward_hook(lambda _, __, output: output * 2)


def other_storage(net: Net) -> None:
    net.one.weight.data = torch.rand(SIZE, SIZE, device=DEVICE)


CHANGES = [
    replace_weight, replace_module, replace_hidden_module, replace_buffer, write_buffer, tie, give_parameter, add_hook,
    other_storage,
]  # fmt: skip


@pytest.mark.one_in(9)
@pytest.mark.parametrize("how", ["function", "module"])
@pytest.mark.parametrize("change", CHANGES)
def test_each_recording_sees_a_change(change: Any, how: str) -> None:
    """Half of the shapes are recorded before the change and half after it; all of them give eager's values."""
    net = Net().to(DEVICE)
    plain = Net.forward.__get__(net)
    target: Any = net if how == "module" else lambda x: net(x)
    f = capture(target, max_recordings=20)
    for batch, x in enumerate(inputs()):
        for _ in range(3 if batch < 2 else 1):
            mark_step_begin()
            same(f(x), plain(x))
    change(net)
    for _ in range(4):
        for x in inputs():
            mark_step_begin()
            same(f(x), plain(x))


def test_shapes_are_recorded_once_each() -> None:
    """Nothing is watched or recorded more often because a sibling exists, and both still hold after a replay."""
    net = Net().to(DEVICE)
    f = capture(lambda x: net(x))
    for _ in range(4):
        for x in inputs():
            mark_step_begin()
            same(f(x), net(x))
    totals = recordings(f)
    assert (totals.recordings, totals.observations, totals.body_runs) == (4, 4, 8)


def test_a_sibling_of_an_argument_s_state() -> None:
    """State below an argument belongs to that argument: a check of another call says nothing about it."""

    class Box(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight: Tensor
            self.register_buffer("weight", torch.full((SIZE,), value, device=DEVICE))

    @capture(max_recordings=20)
    def f(x: Tensor, box: Box) -> Tensor:
        return x * box.weight

    boxes = [Box(1.0), Box(2.0)]
    for _ in range(4):
        for x in inputs():
            for box in boxes:
                mark_step_begin()
                same(f(x, box), x * box.weight)
        boxes[0].weight = boxes[0].weight * 3


def test_attributes_that_come_and_go_are_seen() -> None:
    """A module's attributes, empty tables and members before and after a run, one kind of change at a time."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: Any = nn.Module()
            self.turn = 0

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.inner.last = x * 2
            self.inner.seen = True
            return x + 1

    net = Steps()
    f = capture(net)
    for i in range(6):
        mark_step_begin()
        x = torch.full((3,), float(i), device=DEVICE)
        same(f(x), x + 1)
        same(net.inner.last, x * 2)
        assert net.inner.seen
