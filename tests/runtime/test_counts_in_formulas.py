"""Counters in Python state from which Python computes numbers for operators, as the bias corrections of an optimizer
that is written in Python."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from math import sqrt as own_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.bucketed import assert_same
from tests.support.device import AGAIN, EXECUTES, LIFTS
from tests.support.no_plans import no_plans as no_plans

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # where each value is another key
CALLS = 24


def is_lifted(f: Any) -> bool:
    """Whether one recording serves all values."""
    return any("one recording serves" in event.detail for event in recordings(f).events)


class Adam:
    """Adam written by hand, as many programs have it."""

    def __init__(self, net: nn.Module) -> None:
        self.weights = list(net.parameters())
        self.t, self.rate = 0, 0.01
        self.mean = [torch.zeros_like(weight) for weight in self.weights]
        self.square = [torch.zeros_like(weight) for weight in self.weights]
        self.seen: Any = None
        self.table = [0.1 * number for number in range(100)]

    def corrections(self) -> tuple[float, float]:
        return 1 - 0.9**self.t, 1 - 0.999**self.t

    def advance(self) -> None:
        self.t += 1

    @torch.no_grad()
    def step(self) -> None:
        self.advance()
        first, second = self.corrections()
        for weight, mean, square in zip(self.weights, self.mean, self.square, strict=True):
            grad = weight.grad
            assert grad is not None
            mean.mul_(0.9).add_(grad, alpha=0.1)
            square.mul_(0.999).addcmul_(grad, grad, value=0.001)
            weight.addcdiv_(mean / first, (square / second).sqrt_().add_(1e-8), value=-self.rate)


class WithMath(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return 1 - math.pow(0.9, self.t), math.sqrt(1 - 0.999**self.t) * math.log(self.t + 1.5)


class WarmUp(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return 1 / (0.13 * self.t), (self.t + 3) * 0.3


class OnlyCounted(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return 1.5, 2.5


class Twice(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        self.t = self.t + 2
        return 1 - 0.9**self.t, 1 - 0.999 ** (self.t - 1)


class AFunctionOfMath(Adam):
    """A function of ``math`` is called by a global name of this module: what it reads is not seen."""

    @override
    def corrections(self) -> tuple[float, float]:
        return 1 - 0.9**self.t, own_name(self.t)


class Branches(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return (1 - 0.9**self.t, 1.0) if math.sqrt(self.t) > 3 else (0.5, 1 - 0.999**self.t)


class Rounds(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return 1 - 0.9**self.t, float(1 + math.floor(self.t / 7))


class Indexes(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return 1 - 0.9**self.t, 1 + self.table[self.t]


class Repeats(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        return 1 - 0.9**self.t, 0.5 + len("ab" * self.t)


class Keeps(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        self.seen = [self.t]
        return 1 - 0.9**self.t, 1 - 0.999**self.t


class Writes(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        self.seen = f"step {self.t}"
        return 1 - 0.9**self.t, 1 - 0.999**self.t


class Wraps(Adam):
    @override
    def corrections(self) -> tuple[float, float]:
        result = 1 - 0.9**self.t, 1 - 0.999**self.t
        self.t = self.t % 5
        return result


class FromACounterInC(Adam):
    """The count comes from ``itertools.count``, which an undone run would advance."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.numbers = itertools.count(3)

    @override
    def advance(self) -> None:
        self.t = next(self.numbers)


class AskedOfACounterInC(FromACounterInC):
    @override
    def corrections(self) -> tuple[float, float]:
        return (0.5, 1.5) if self.t % 4 == 0 else (0.25, 1.25)


LIFTED = [Keeps, Adam, WithMath, WarmUp, Twice, Wraps]
READ = [AFunctionOfMath, Rounds, Indexes, Repeats, Writes, FromACounterInC, AskedOfACounterInC]


class Trained:
    """A net, its optimizer, and a step of training."""

    def __init__(self, kind: type[Adam]) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 1))
        self.optimizer = kind(self.net)

    def step(self, x: Tensor) -> Tensor:
        for weight in self.optimizer.weights:
            weight.grad = None
        loss: Tensor = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> tuple[Any, ...]:
        optimizer = self.optimizer
        return optimizer.t, type(optimizer.t), optimizer.seen, optimizer.weights, optimizer.mean, optimizer.square


def beside(kind: type[Adam], change: Callable[[int, Adam], None] = lambda call, optimizer: None) -> Any:
    """The captured step, after calls beside its eager twin."""
    eager, ours = Trained(kind), Trained(kind)
    f = capture(ours.step, max_recordings=30)
    for call in range(CALLS):
        for trained in (eager, ours):
            change(call, trained.optimizer)
        x = torch.randn(5, 4)
        assert_same(f(x), eager.step(x))
        assert_same(ours.state()[3:], eager.state()[3:])
        assert ours.state()[:3] == eager.state()[:3]
    return f


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", LIFTED)
def test_one_recording_serves_all_counts(kind: type[Adam]) -> None:
    f = beside(kind)
    assert is_lifted(f) == LIFTS, [event.detail for event in recordings(f).events]
    if LIFTS:
        assert recordings(f).replays > CALLS - 10
        assert recordings(f).recordings <= 3 + AGAIN


@pytest.mark.one_in(2)
def test_each_way_of_the_body_has_a_recording_for_its_counts() -> None:
    f = beside(Branches)
    lifts = LIFTS and EXECUTES  # where a run only captures, not seen on a GPU since numbers are asked
    assert is_lifted(f) or not lifts
    assert recordings(f).replays > CALLS - 12 or not lifts


def test_a_number_that_is_only_counted_is_no_part_of_the_key() -> None:
    f = beside(OnlyCounted)
    assert recordings(f).replays > CALLS - 8
    assert recordings(f).recordings <= 2


@pytest.mark.one_in(18)
@pytest.mark.parametrize("kind", READ)
def test_a_count_that_python_reads_stays_in_the_key(kind: type[Adam]) -> None:
    assert not is_lifted(beside(kind))


def test_a_count_that_is_set_anew() -> None:
    def change(call: int, optimizer: Adam) -> None:
        if call in (12, 17):
            optimizer.t = 100 if call == 12 else 0

    f = beside(Adam, change)
    assert is_lifted(f) == LIFTS


def test_a_count_that_becomes_a_float_or_is_gone() -> None:
    def change(call: int, optimizer: Adam) -> None:
        if call == 14:
            optimizer.t = float(optimizer.t)  # type: ignore[assignment]

    beside(Adam, change)


def test_another_rate_too() -> None:
    def change(call: int, optimizer: Adam) -> None:
        optimizer.rate = 0.01 / (1 + call)

    f = beside(WithMath, change)
    assert is_lifted(f) == LIFTS


class Grows(Adam):
    """The amount by which it counts is another number later."""

    amount = 1

    @override
    def corrections(self) -> tuple[float, float]:
        self.t += self.amount - 1
        return 1 - 0.9**self.t, 1 - 0.999**self.t


def test_another_amount() -> None:
    def change(call: int, optimizer: Adam) -> None:
        if call == 14:
            optimizer.amount = 3  # type: ignore[attr-defined]

    beside(Grows, change)


@pytest.mark.slow
def test_beside_another_thread_math_is_not_touched() -> None:
    """That thread would see the stand-ins for its functions."""
    before, seen, done = dict(vars(math)), set[int](), threading.Event()

    def looks() -> None:
        while not done.is_set():
            seen.add(id(math.sqrt))

    thread = threading.Thread(target=looks)
    thread.start()
    try:
        beside(WithMath)
    finally:
        done.set()
        thread.join()
    assert seen == {id(math.sqrt)}
    assert vars(math) == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [WithMath, Branches])
def test_math_is_as_before(kind: type[Adam]) -> None:
    before = dict(vars(math))
    beside(kind)
    assert vars(math) == before


def test_a_function_that_a_user_put_into_math_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(number: float) -> float:
        return 2 * number

    monkeypatch.setattr(math, "sqrt", doubled)
    beside(WithMath)
    assert math.sqrt is doubled


class Optimizer(torch.optim.Optimizer):
    """A subclass of torch's, with its count in the group, or one for each parameter."""

    def __init__(self, net: nn.Module, *, is_of_group: bool) -> None:
        super().__init__(net.parameters(), {"lr": 0.01, "step": 0})
        self.is_of_group = is_of_group

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.is_of_group:
                group["step"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(weight)
                if not self.is_of_group:
                    state["step"] += 1
                count = group["step"] if self.is_of_group else state["step"]
                state["mean"].lerp_(weight.grad, 0.1)
                weight.add_(state["mean"], alpha=-group["lr"] / math.sqrt(1 - 0.9**count))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_of_group", [True, False])
def test_an_optimizer_with_a_count(*, is_of_group: bool) -> None:
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 1))
        twins.append(SimpleNamespace(net=net, optimizer=Optimizer(net, is_of_group=is_of_group)))

    def step_of(trained: Any) -> Callable[[Tensor], Tensor]:
        net, optimizer = trained.net, trained.optimizer

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    (eager, ours), f = twins, capture(step_of(twins[1]), max_recordings=30)
    plain = step_of(eager)
    for _ in range(CALLS):
        x = torch.randn(5, 4)
        assert_same(f(x), plain(x))
        assert_same(list(ours.net.parameters()), list(eager.net.parameters()))
        theirs, own = (trained.optimizer.state_dict() for trained in (eager, ours))
        assert own["param_groups"] == theirs["param_groups"]
        assert [state["step"] for state in own["state"].values() if "step" in state] == [
            state["step"] for state in theirs["state"].values() if "step" in state
        ]
    assert is_lifted(f) == (is_of_group and LIFTS), [event.detail for event in recordings(f).events]
    if LIFTS:  # a step that counts elsewhere runs eagerly between two segments
        assert recordings(f).replays > CALLS - 12
