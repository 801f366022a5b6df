"""Inputs that are returned, and views of them, are the caller's own memory; version counters rise as in eager."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings, warmup
from tests.support.device import DEVICE
from tests.support.writes import bits, x_of
from tests.support.writes import fresh as fresh

# --------------------------------------------------------------------------------------- returned inputs, and views


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "view": lambda x: x[1:],
    "transposed": lambda x: (x.t(), x + 1),
    "flat": lambda x: x.view(-1)[2:],
    "unbind": lambda x: x.unbind(),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1)),
    "detached": lambda x: x.detach(),
    "expanded": lambda x: x[:1].expand(5, 4),
    "other-dtype": lambda x: x.view(torch.int32),
    "written": lambda x: x.add_(1)[1:],
    "beside-fresh": lambda x: {"x": x, "part": [x[0], torch.tanh(x)]},
}


def first_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return first_tensor(next(iter(value.values())) if isinstance(value, dict) else value[0])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("static", [[], ["x"]], ids=["copied", "static"])
@pytest.mark.parametrize("name", ALIASES)
def test_returned_views_are_the_callers_memory(name: str, static: list[str]) -> None:
    function = ALIASES[name]
    captured = capture(lambda x: function(x), static=static)
    for seed in range(6):
        mine, theirs = x_of(seed), x_of(seed)
        got, expected = captured(mine), function(theirs)
        assert bits(got) == bits(expected)
        assert (first_tensor(got) is mine) == (first_tensor(expected) is theirs)
        mine.add_(1)
        theirs.add_(1)
        assert bits(got) == bits(expected)
        if name != "expanded":
            first_tensor(got).zero_()
            first_tensor(expected).zero_()
        assert bits(mine) == bits(theirs)


def test_a_returned_argument_of_another_offset() -> None:
    """A returned view is one of this call's argument, wherever that begins in its storage."""
    captured = capture(lambda x: (x[1:], x * 2))
    for offset in (0, 16, 4, 32, 8, 0):
        base = x_of(1, 64)
        mine = base[offset : offset + 12].view(3, 4)
        view, double = captured(mine)
        assert bits([view, double]) == bits([mine[1:], mine * 2])
        view.zero_()
        assert base[offset + 4 : offset + 12].eq(0).all()


def test_returned_weights_are_the_modules_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(x_of(1))

        @override
        @capture
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.weight, self.weight[1:], torch.tanh(x)

    net = Net()
    for seed in range(8):
        if seed == 5:
            net.weight = nn.Parameter(x_of(9))
        weight, part, _ = net(x_of(seed))
        assert weight is net.weight
        part.zero_()
        assert net.weight[1:].eq(0).all()
        net.weight.copy_(x_of(seed))


# -------------------------------------------------------------------------------------------------- version counters


def test_version_counters_tell_who_was_written() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.written: Tensor
            self.read: Tensor
            self.register_buffer("written", torch.zeros(4))
            self.register_buffer("read", torch.ones(4))

        @override
        @capture(static=["fixed"])
        def forward(self, x: Tensor, y: Tensor, fixed: Tensor) -> Tensor:
            x.add_(1)
            self.written.add_(y.sum(0))
            fixed.mul_(2)
            return x + y + self.written + self.read + fixed

    net, fixed = Net(), x_of(5)
    for seed in range(6):
        x, y = x_of(seed), x_of(seed + 1)
        tensors = [x, y, fixed, net.written, net.read]
        before = [tensor._version for tensor in tensors]
        net(x, y, fixed)
        assert [tensor._version > old for tensor, old in zip(tensors, before, strict=True)] == [
            True,
            False,
            True,
            True,
            False,
        ]


def test_version_counters_of_shared_arguments_rise() -> None:
    captured = capture(lambda a, b: a.add_(1) + b)
    for seed in range(6):
        base = x_of(seed, 8)
        before = base._version
        captured(base[:6], base[2:])
        assert base._version > before


def test_autograd_notices_a_replayed_write() -> None:
    """A tensor saved for backward and then written by a replay is an error, as in eager."""
    captured = capture(lambda buffer: buffer.add_(1).sum(), static=["buffer"])
    buffer = torch.ones(3)
    for _ in range(3):
        captured(buffer)
    with torch.enable_grad():
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * buffer).sum()
        with torch.no_grad():
            captured(buffer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("options", [{}, {"static": ["out"]}, {"inputs": "bind"}], ids=str)
def test_an_out_of_another_shape_gets_its_memory_eagerly(options: Any) -> None:
    """``out=`` with another shape gives the caller's tensor new memory, which must not be a recording's: eager."""

    def body(x: Tensor, out: Tensor) -> Tensor:
        torch.add(x, 1, out=out)
        return x * 2

    mine = capture(body, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning about the shape, and CG202
        for number in range(6):
            x = torch.full((6, 4), float(number), device=DEVICE)
            ours, theirs = torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
            assert torch.equal(mine(x, ours), body(x, theirs))
            assert torch.equal(ours, theirs)
        warmup(mine)(x, given := torch.zeros(2, 4, device=DEVICE))
        assert torch.equal(given, torch.zeros(2, 4, device=DEVICE))
    assert recordings(mine).recordings == 0
    assert any("out= of another shape" in finding.what for finding in recordings(mine).findings)


class Rebuilding:
    """Makes its list anew in every call, as wrappers do that look up their parts each time."""

    def __init__(self, count: int) -> None:
        self.source = [torch.full((4,), float(number + 1)) for number in range(count)]
        self.parts = list(self.source)
        self.named = {"first": [*self.source]}

    def run(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * 2 + part
        x = x + self.named["first"][-1]
        self.parts = list(self.parts)
        self.named = {"first": [*self.named["first"]]}
        return x


def test_containers_that_the_body_makes_anew() -> None:
    """A list that is made anew with the same members needs no new recording. Other members, another length or another
    order do."""
    mine, theirs = Rebuilding(2), Rebuilding(2)
    captured = capture(mine.run)

    def call_both(seed: int) -> None:
        mark_step_begin()
        x = torch.full((4,), float(seed))
        assert torch.equal(captured(x), theirs.run(x))

    for seed in range(6):
        call_both(seed)
    assert recordings(captured).recordings == 1
    assert recordings(captured).replays >= 3
    for change in (
        lambda module: module.parts.append(torch.full((4,), 9.0)),
        lambda module: setattr(module, "parts", [*module.parts, torch.full((4,), -3.0)]),
        lambda module: module.parts.reverse(),
        lambda module: module.parts.pop(),
        lambda module: module.named["first"].append(torch.full((4,), 8.0)),
        lambda module: module.named["first"].__setitem__(-1, torch.full((4,), 7.0)),
    ):
        change(mine)
        change(theirs)
        for seed in range(4):
            call_both(seed)
