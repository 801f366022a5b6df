"""A recording run that does something else than the watched run before it is noticed, and its values are not frozen."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import DEVICE, healthy, may_fall_back, needs_cuda, needs_gpu, rand, same

pytestmark = [needs_gpu, may_fall_back]

SIZE = 64


class Turn:
    """The number of runs so far, in Python state that is in no key."""

    def __init__(self) -> None:
        self.runs: list[int] = []

    def __call__(self) -> int:
        self.runs.append(1)
        return len(self.runs) - 1


def other_number(x: Tensor, turn: int, a: Tensor, b: Tensor) -> Tensor:
    """A body with another Python number in every other run."""
    return x * (2.0 + turn % 2) + a - b


def other_sign(x: Tensor, turn: int, a: Tensor, b: Tensor) -> Tensor:
    """A body with a zero of another sign in every other run; ``==`` finds the two equal."""
    return torch.copysign(x, x.new_ones(()) * (-0.0 if turn % 2 else 0.0)) + a - b


def other_operator(x: Tensor, turn: int, a: Tensor, b: Tensor) -> Tensor:
    """A body with another operator in every other run."""
    return (x.sin() if turn % 2 else x.cos()) + a - b


def one_less(x: Tensor, turn: int, a: Tensor, b: Tensor) -> Tensor:
    """A body whose last operator is missing in every other run."""
    y = x + a
    return y if turn % 2 else y - b


def other_output(x: Tensor, turn: int, a: Tensor, b: Tensor) -> Any:
    """A body of the same operators with another result."""
    y = x + a
    z = y - b
    return y if turn % 2 else z


BODIES = [other_number, other_sign, other_operator, one_less, other_output]


@needs_cuda
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("body", BODIES)
def test_what_differs_is_not_frozen(body: Callable[..., Any], first: int) -> None:
    """Each run takes the other of two ways. Each result has to be one that eager code gives, no call may give an
    earlier run's, and the function has to give up after some calls."""
    turn, a, b = Turn(), rand(SIZE, seed=1), rand(SIZE, seed=2)
    turn.runs += [1] * first
    f = capture(lambda x: body(x, turn(), a, b))
    for i in range(12):
        mark_step_begin()
        x = rand(SIZE, seed=i)
        before = len(turn.runs)
        y = f(x)
        assert len(turn.runs) > before, "a recording was replayed"
        same(y, body(x, len(turn.runs) - 1, a, b))
    healthy()


@needs_cuda
def test_memory_that_was_not_used_before() -> None:
    """The body applies the same operators to another tensor, to which no Python state that is watched leads."""
    turn, hidden = Turn(), [rand(SIZE, seed=1), rand(SIZE, seed=2)]
    pick = dict(enumerate(hidden)).__getitem__

    @capture
    def f(x: Tensor) -> Tensor:
        return x + pick(turn() % 2)

    for i in range(12):
        mark_step_begin()
        x = rand(SIZE, seed=i)
        y = f(x)
        same(y, x + hidden[(len(turn.runs) - 1) % 2])


@needs_cuda
def test_another_input_is_written() -> None:
    """Which of two buffers is written changes between runs; eager's values are in both after every call."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one: Tensor
            self.two: Tensor
            self.register_buffer("one", torch.zeros(SIZE, device=DEVICE))
            self.register_buffer("two", torch.zeros(SIZE, device=DEVICE))
            self.turn = Turn()

        @override
        def forward(self, x: Tensor) -> Tensor:
            (self.one if self.turn() % 2 else self.two).add_(x)
            return self.one + self.two

    net = capture(Net())
    total = torch.zeros(SIZE, device=DEVICE)
    for i in range(10):
        mark_step_begin()
        x = rand(SIZE, seed=i)
        total += x
        same(net(x), total) if i == 0 else torch.testing.assert_close(net(x), total)


@needs_cuda
def test_state_moves_between_the_watched_run_and_the_recording() -> None:
    """Weights are replaced and changed before the second call, and a tensor is stored elsewhere."""
    for change in ("replace", "write", "swap"):
        net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)).to(DEVICE).requires_grad_(False)
        f = capture(lambda x, net=net: net(x))
        first, last = net[0], net[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        for i in range(6):
            if i in (1, 3) and change == "replace":
                first.weight = nn.Parameter(rand(SIZE, SIZE, seed=10 + i), requires_grad=False)
            if i in (1, 3) and change == "write":
                first.weight.mul_(-0.5)
            if i in (1, 3) and change == "swap":
                first.weight, last.weight = last.weight, first.weight
            mark_step_begin()
            x = rand(3, SIZE, seed=i)
            same(f(x), net(x))
        healthy()


def hiding() -> Generator[None, Tensor, None]:
    """Keeps tensors where a watched run does not look."""
    kept: list[Tensor] = []
    while True:
        kept.append((yield))


def test_another_run_that_left_a_tensor_behind() -> None:
    """An undone run left a tensor in the pool that nobody tracks: the pool is given up before the body runs again."""
    turn, hidden = Turn(), hiding()
    next(hidden)

    @capture
    def f(x: Tensor) -> Tensor:
        y = x * 2
        if turn() % 2:
            y = y + 1
            hidden.send(y)
        return y

    for i in range(6):
        mark_step_begin()
        x = rand(SIZE, seed=i)
        y = f(x)
        same(y, x * 2 + 1 if (len(turn.runs) - 1) % 2 else x * 2)
    healthy()


@needs_cuda
def test_many_shapes_follow() -> None:
    """Every recording after the first call of its shape follows; each gives eager's bits."""
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(SIZE, SIZE), nn.GELU())])
    net = net.to(DEVICE).requires_grad_(False)
    f = capture(lambda x: net(x), max_recordings=20)
    for batch in range(1, 9):
        for i in range(3):
            mark_step_begin()
            x = rand(batch, SIZE, seed=i)
            same(f(x), net(x))
    totals = recordings(f)
    assert (totals.recordings, totals.observations, totals.body_runs) == (8, 8, 16)
    linear = net[0]
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(rand(SIZE, SIZE, seed=99), requires_grad=False)
    for batch in range(1, 9):
        mark_step_begin()
        x = rand(batch, SIZE, seed=5)
        same(f(x), net(x))


@needs_cuda
def test_kv_cache_and_chain_follow() -> None:
    """Writes through views of state, outputs fed to the next function, and state set by the body."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)
            self.cache: Tensor
            self.last: Any = None
            self.register_buffer("cache", torch.zeros(4, SIZE))

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.cache[1:3].add_(x)
            self.last = torch.relu(self.linear(x))
            result: Tensor = self.last + self.cache.sum(0)
            return result

    def make() -> list[Any]:
        torch.manual_seed(0)
        return [Layer().to(DEVICE).requires_grad_(False) for _ in range(3)]

    plain, ours = make(), [capture(layer) for layer in make()]
    for i in range(8):
        mark_step_begin()
        x = y = rand(2, SIZE, seed=i)
        for layer in plain:
            x = layer(x)
        for layer in ours:
            y = layer(y)
        same([y, *(block.cache for block in ours), ours[0].last], [x, *(block.cache for block in plain), plain[0].last])
    healthy()
