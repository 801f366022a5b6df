"""Weights and static arguments that are replaced or become outputs between calls. Always eager's bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, mark_step_begin, recordings
from tests.support.chains import bits, f_eager, x_of
from tests.support.chains import f as f
from tests.support.chains import fresh as fresh
from tests.support.device import DEVICE, REBINDS
from tests.support.rows import followed


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.table: Tensor
        self.register_buffer("table", x_of(seed + 2, 4))
        with torch.no_grad():
            self.linear.weight.copy_(x_of(seed, 4, 4))
            self.norm.running_mean.copy_(x_of(seed + 1, 4))  # type: ignore[union-attr]

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x))) * self.table


def _share(net: Net) -> None:
    net.linear.weight = nn.Parameter(x_of(31, 8, 4)[::2])


REPLACEMENTS: dict[str, Callable[[Net], object]] = {
    "setattr": lambda net: setattr(net.linear, "weight", nn.Parameter(x_of(30, 4, 4))),
    "setattr-same-values": lambda net: setattr(net.linear, "weight", nn.Parameter(net.linear.weight.clone())),
    "setattr-other-stride": lambda net: setattr(net.linear, "weight", nn.Parameter(x_of(30, 4, 4).t())),
    "setattr-no-grad": lambda net: setattr(net.linear, "weight", nn.Parameter(x_of(30, 4, 4), requires_grad=False)),
    "setattr-view": _share,
    "data": lambda net: setattr(net.linear.weight, "data", x_of(32, 4, 4)),
    "data-of-a-buffer": lambda net: setattr(net.table, "data", x_of(32, 4)),
    "load": lambda net: net.load_state_dict(Net(40).state_dict()),
    "load-assign": lambda net: net.load_state_dict(Net(41).state_dict(), assign=True),
    "to-float64-and-back": lambda net: net.to(torch.float64).to(torch.float32),
    "to-the-same": lambda net: net.to(DEVICE, torch.float32),
    "module": lambda net: setattr(net, "linear", nn.Linear(4, 4)),
    "buffer": lambda net: setattr(net, "table", x_of(33, 4)),
    "running-mean": lambda net: setattr(net.norm, "running_mean", x_of(34, 4)),
    "in-place": lambda net: net.linear.weight.mul_(2),
    "swapped-modules": lambda net: setattr(net, "norm", nn.BatchNorm1d(4).eval()),
    "resize": lambda net: net.linear.weight.data.copy_(x_of(35, 4, 4)),
    "vector_to_parameters": lambda net: nn.utils.vector_to_parameters(
        x_of(36, sum(p.numel() for p in net.parameters())), net.parameters()
    ),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_weight_replaced_between_calls(replacement: str, marked: bool) -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for round_ in range(3):
        for seed in range(3):
            if marked:
                mark_step_begin()
            assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
        for module in (net, twin):
            torch.manual_seed(round_)
            REPLACEMENTS[replacement](module)
    for seed in range(3):
        assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
    assert recordings(net.forward).replays > 0


def test_a_moved_weight_is_a_rebind_not_a_recording() -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for round_ in range(20):
        for seed in range(3):
            assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))
        for module in (net, twin):
            module.linear.weight.data = x_of(round_, 4, 4)
    followed(net.forward, 19)
    assert recordings(net.forward).replays >= (58 if REBINDS else 20)


def test_to_another_dtype_and_back() -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32):
        net.to(dtype)
        twin.to(dtype)
        for seed in range(3):
            assert bits(captured(x_of(seed).to(dtype))) == bits(twin(x_of(seed).to(dtype)))


def test_tied_weights_come_apart() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.first.weight = self.second.weight = nn.Parameter(x_of(1, 4, 4))

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(torch.tanh(self.first(x)))
            return y

    net = Tied()
    twin = copy.deepcopy(net)
    captured = capture(net)
    changes: list[Callable[[Tied], object]] = [
        lambda tied: None,
        lambda tied: tied.first.weight.mul_(2),
        lambda tied: setattr(tied.second, "weight", nn.Parameter(x_of(2, 4, 4))),
        lambda tied: tied.first.weight.mul_(2),
        lambda tied: setattr(tied.second, "weight", tied.first.weight),
        lambda tied: tied.first.weight.mul_(2),
    ]
    for change in changes:
        for module in (net, twin):
            change(module)
        for seed in range(4):
            assert bits(captured(x_of(seed))) == bits(twin(x_of(seed)))


@pytest.mark.filterwarnings("ignore:CG904")  # state that lies in the pool may make the call eager, on a device
def test_an_output_becomes_a_weight(f: Callable[[Tensor], Tensor]) -> None:
    net = Net().eval()
    twin = copy.deepcopy(net)
    captured = capture(net)
    for seed in range(8):
        net.table = f(x_of(seed, 4))
        twin.table = f_eager(x_of(seed, 4))
        for later in range(3):
            assert bits(captured(x_of(later))) == bits(twin(x_of(later)))
        f(x_of(seed + 50, 4))
        assert bits(net.table) == bits(twin.table)


@pytest.mark.filterwarnings("ignore:CG904")  # state that lies in the pool may make the call eager, on a device
@pytest.mark.parametrize("rounds", [1, 3])
def test_an_output_becomes_the_data_of_a_weight(f: Callable[[Tensor], Tensor], rounds: int) -> None:
    """The pool hands out the same address again; what lies there is another tensor."""
    net = nn.Linear(4, 3, bias=False)
    captured = capture(net)
    for seed in range(8):
        net.weight.data = f(x_of(seed))
        for later in range(rounds):
            expected = nn.functional.linear(x_of(later), f_eager(x_of(seed)))
            assert bits(captured(x_of(later))) == bits(expected), (seed, later)
        f(x_of(seed + 1))
        assert bits(net.weight.data) == bits(f_eager(x_of(seed)))


def test_a_static_argument_is_an_output(f: Callable[[Tensor], Tensor]) -> None:
    captured = capture(lambda table: table.mul_(2).t() + 1, static=["table"])
    own = x_of(5)
    expected_own = x_of(5)
    for seed in range(16):
        table, expected = (f(x_of(seed)), f_eager(x_of(seed))) if seed % 3 else (own, expected_own)
        assert bits(captured(table)) == bits(expected.mul_(2).t() + 1)
        assert bits(table) == bits(expected)


@pytest.mark.filterwarnings("ignore:CG904")  # state that lies in the pool may make the call eager, on a device
@pytest.mark.filterwarnings("ignore:CG103")  # where the argument is the table, the call is eager and says so
def test_an_implicit_input_is_an_output(f: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(3, 4)

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.table.add_(x)
            return self.table.t() * 2

    net, twin = Net(), Net()
    captured = capture(net)
    for seed in range(16):
        if seed % 3 == 0:
            net.table, twin.table = f(x_of(seed)), f_eager(x_of(seed))
        x, expected = (net.table, twin.table) if seed % 5 == 4 else (x_of(seed + 1), x_of(seed + 1))
        assert bits(captured(x)) == bits(twin(expected)), seed
        assert bits(net.table) == bits(twin.table)


def test_backward_through_a_kept_output(f: Callable[[Tensor], Tensor]) -> None:
    """What autograd saved of an output stays what it was, however many calls come between."""
    weight = x_of(3).requires_grad_()
    losses = []
    for seed in range(8):
        y = f(x_of(seed))
        with torch.enable_grad():
            losses.append((weight * y).sum())
        del y
    for seed, loss in enumerate(losses):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert bits(gradient) == bits(f_eager(x_of(seed)))


def test_a_static_argument_that_moves_is_bound_again() -> None:
    captured = capture(lambda x, table: x @ table, static=["table"])
    tables = [x_of(seed, 4, 4) for seed in range(6)]
    for seed in range(24):
        table = tables[seed // 4]
        table.add_(1)
        assert bits(captured(x_of(seed), table)) == bits(x_of(seed) @ table)
    followed(captured, 5)
    assert recordings(captured).replays >= (22 if REBINDS else 12)


def test_more_shapes_than_recordings_run_eagerly() -> None:
    captured = capture(lambda x: f_eager(x), max_recordings=2)
    with pytest.warns(CaptureWarning, match="CG901") as warned:
        got = [bits(captured(x_of(size, size, 4))) for size in (2, 3, 4, 5, 6) * 3]
    assert got == [bits(f_eager(x_of(size, size, 4))) for size in (2, 3, 4, 5, 6) * 3]
    assert len(warned) == 1


def test_a_function_may_die_while_another_one_records() -> None:
    """Garbage collection inside a recording drops a dead function's recordings only afterwards."""

    class Net(nn.Module):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) + 1

    doomed = [capture(Net())]
    for seed in range(3):
        doomed[0](x_of(seed))

    def body(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        if doomed and collecting:
            doomed.pop()
            gc.collect()
        return y * 2 + x

    collecting: list[bool] = []
    captured = capture(lambda x: body(x))
    captured(x_of(0))
    collecting.append(True)
    kept = []
    for seed in range(1, 6):
        kept.append((captured(x_of(seed)), torch.tanh(x_of(seed)) * 2 + x_of(seed)))
        for got, expected in kept:
            assert bits(got) == bits(expected)
    assert not doomed
