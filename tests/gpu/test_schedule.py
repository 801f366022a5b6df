"""Kernels ordered by their data dependencies give the recorded order's values bit for bit, also where memory is
shared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capture import capture, config, recordings
from capture.engines.cuda import schedule_choice, scheduling
from capture.schedule import dependencies as pure
from tests.gpu.support import DEVICE, needs_cuda, rand, same

pytestmark = needs_cuda
CALLS = 3 + len(schedule_choice.ROUNDS) * (schedule_choice.EACH + 1) + 8


@pytest.fixture(autouse=True)
def by_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the order by data whatever its time: the tests are about values."""
    monkeypatch.setattr(schedule_choice, "_GAIN", float("inf"))


def check(body: Callable[..., object], inputs: Callable[[int], Sequence[Tensor]], room: int) -> str:
    """Compare both orders on the same inputs and draws; half of the calls by data run on poisoned memory. Gives the
    chosen order."""
    results = []
    captured = capture(body, schedule="auto")
    for function in (body, captured):
        torch.manual_seed(5)
        copies = []
        for number in range(CALLS + 20):
            given = inputs(number)
            with torch.no_grad(), config.patch(schedule_after=2, schedule_room=room, poison=number > CALLS + 8):
                out = function(*given)
            copies.append([tensor.clone() for tensor in (out if isinstance(out, tuple) else (out,))] + [*given])
            torch.cuda.synchronize()
        results.append(copies)
    same(results[1], results[0])
    (size,) = recordings(captured).sizes
    return size.order


def branches(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.stack([functional.gelu(functional.gelu(x @ one) @ one) for one in weights]).mean(0)


def test_branches() -> None:
    """Independent branches run side by side, unless one uses the memory of another again, which makes a chain."""
    weights = [rand(64, 64, seed=number) for number in range(6)]
    for room, order in ((0, ""), (64 << 20, "by data")):
        assert check(branches, lambda number: [rand(3, 64, seed=number), *weights], room).startswith(order)


@pytest.mark.parametrize("room", [0, 64 << 20])
def test_draws_views_and_writes(room: int) -> None:
    def body(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        parts = [functional.dropout(x * number, 0.5) + torch.randn_like(x) for number in range(4)]
        for number, one in enumerate(parts):
            out[number].copy_(one)
        out[1:3].mul_(2)
        return out.sum(0), out.transpose(0, 1).reshape(-1).cumsum(0)

    assert check(
        body, lambda number: [rand(5, 32, seed=number), torch.zeros(4, 5, 32, device=DEVICE)], room
    ).startswith("by data")


def test_convolutions_and_norms_that_keep_statistics() -> None:
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(DEVICE) for _ in range(3)
    ]

    def body(x: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        outs = [net(x) for net in nets]
        statistics = [buffer.clone() for net in nets for buffer in net.buffers()]
        return sum(outs[1:], outs[0]), *statistics

    before = {name: value.clone() for name, value in nn.ModuleList(nets).state_dict().items()}

    def inputs(number: int) -> Sequence[Tensor]:
        if number == 0:
            nn.ModuleList(nets).load_state_dict(before)
        return [rand(2, 3, 16, 16, seed=number)]

    assert check(body, inputs, 64 << 20).startswith("by data")


def test_a_chain_stays_as_recorded() -> None:
    def body(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + 1
        return x

    assert check(body, lambda number: [rand(7, seed=number)], 0).startswith("recorded")


def test_streams_of_the_body_stay() -> None:
    side = torch.cuda.Stream()

    def body(x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one = x * 2
        other = x + 1
        torch.cuda.current_stream().wait_stream(side)
        return one + other

    assert check(body, lambda number: [rand(7, seed=number)], 0).startswith("recorded")


def test_tensors_that_move_bring_the_recorded_order_back() -> None:
    """A moved tensor may overlap memory that the graph writes, so the recorded order comes back."""
    weights = [nn.Parameter(rand(64, 64, seed=number)) for number in range(4)]
    total = torch.zeros(3, 64, device=DEVICE)

    def body(x: Tensor) -> Tensor:
        total.add_(x)
        return branches(x, *weights) + total

    captured = capture(body, schedule="auto")
    with torch.no_grad(), config.patch(schedule_after=2):
        for number in range(CALLS):
            captured(rand(3, 64, seed=number))
            torch.cuda.synchronize()
        assert recordings(captured).sizes[0].order.startswith("by data")
        weights[1].data = rand(64, 64, seed=9)
        for number in range(4):
            x, before = rand(3, 64, seed=number), total.clone()
            expected = branches(x, *weights) + (before + x)
            same(captured(x), expected)
            same(total, before + x)
    assert recordings(captured).sizes[0].order.startswith("recorded")


def program(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    """A random program of branches, views, writes in place, draws, sorts and products."""
    chosen = random.Random(seed)
    steps = [(chosen.randrange(9), chosen.randrange(1000), chosen.randrange(1000)) for _ in range(30)]

    def body(*given: Tensor) -> tuple[Tensor, ...]:
        values = [value.clone() for value in given]
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == 0:
                values.append(a @ b)
            elif kind == 1:
                values.append((a + b).tanh())
            elif kind == 2:
                a[: 1 + second % 16].mul_(0.5)
            elif kind == 3:
                values.append(functional.dropout(a, 0.5))
            elif kind == 4:
                values.append(a.t())
            elif kind == 5:
                values.append(a.sort(-1).values)
            elif kind == 6:
                a.copy_(b.flip(0))
            elif kind == 7:
                values.append(a.softmax(-1).cumsum(0))
            else:
                values.pop(first % len(values)) if len(values) > 4 else values.append(a * b.sum())
        return tuple(value.contiguous() for value in values)

    return body


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int) -> None:
    given = [rand(16, 16, seed=number) for number in range(3)]
    check(program(seed), lambda number: [one + number * 0.01 for one in given], (seed % 3) << 16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 200))
def test_many_random_programs(seed: int) -> None:
    test_random_programs(seed)


def test_wrong_edges_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """``check`` fails where kernels run in the opposite order and read values of the call before."""

    def backwards(nodes: Sequence[pure.Node]) -> pure.Dependencies:
        return pure.Dependencies(tuple((at + 1, at) for at in range(len(nodes) - 1)), (0,) * len(nodes))

    monkeypatch.setattr(scheduling, "dependencies", backwards)

    def body(x: Tensor) -> Tensor:
        for number in range(1, 8):
            x = functional.gelu(x * number)
        return x

    with pytest.raises(AssertionError):
        check(body, lambda number: [rand(64, 64, seed=number)], 64 << 20)
