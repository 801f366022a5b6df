"""A number that is read and computed with, by numbers in Python state too, is computed anew in each replay, if it is
only kept or returned then: meters, averages, totals. Where more comes of it, it is compared."""

from __future__ import annotations

import functools
import math
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from tests.segments.bodies import Program, draw
from tests.segments.test_bodies import CALLS, compared, fresh
from tests.support.observed import bits

__all__ = ["fresh"]
Kept = Callable[[], Program]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with config.patch(drop_slow=False):
        yield


def kept(body: Callable[..., Any], state: Any, change: Callable[[int], None] = lambda _: None) -> Program:
    """``change``: what happens before each call."""

    def arguments(number: int) -> tuple[Tensor]:
        change(number)
        return (draw(number),)

    return body, arguments, state


class AverageMeter:
    """As in PyTorch's example for ImageNet, and in most training scripts since."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val: float = 0
        self.avg: float = 0
        self.sum: float = 0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    @override
    def __str__(self) -> str:
        return f"{self.val:.3f} ({self.avg:.3f})"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Decorated(AverageMeter):
    @override
    @logged
    def update(self, val: float, n: int = 1) -> None:
        super().update(val, n)


class Smoothed:
    """Its mean is a property."""

    def __init__(self) -> None:
        self.total, self.count, self.ema = 0.0, 0, 0.0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.ema = 0.9 * self.ema + 0.1 * self.mean

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)


class Meters:
    """One for each name."""

    def __init__(self) -> None:
        self.meters: dict[str, AverageMeter] = {}

    def update(self, n: int = 1, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.item()
            assert isinstance(value, (float, int))
            self.meters.setdefault(name, AverageMeter()).update(value, n)


def average() -> Program:
    meter = AverageMeter()

    def body(x: Tensor) -> Tensor:
        meter.update(x.mean().item(), x.size(0))
        return x * 2

    return kept(body, meter)


def two_averages() -> Program:
    meters = [AverageMeter(), AverageMeter()]

    def body(x: Tensor) -> Tensor:
        meters[0].update(x.mean().item())
        meters[1].update((x > 0).sum().item(), n=len(x))
        return x * 2

    return kept(body, SimpleNamespace(a=meters[0].__dict__, b=meters[1].__dict__))


def decorated() -> Program:
    meter = Decorated()

    def body(x: Tensor) -> Tensor:
        meter.update(x.mean().item(), n=x.size(0))
        return x * 2

    return kept(body, meter)


def by_all_names() -> Program:
    meters = Meters()

    def body(x: Tensor) -> Tensor:
        meters.update(n=len(x), loss=x.mean(), norm=x.norm().item())
        return x * 2

    return kept(body, _Shown(meters.meters))


class _Shown:
    """What the meters have, as a state to compare."""

    def __init__(self, meters: dict[str, AverageMeter]) -> None:
        self._meters = meters

    @property
    @override
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: dict(vars(one)) for name, one in self._meters.items()}


def own_average() -> Program:
    state = {"ema": 0.0}

    def body(x: Tensor) -> Tensor:
        state["ema"] = 0.9 * state["ema"] + 0.1 * x.mean().item()
        return x * 2

    return kept(body, state)


def mean_by_a_property() -> Program:
    meter = Smoothed()
    meter.count = 1

    def body(x: Tensor) -> Tensor:
        meter.total += x.mean().item()
        meter.ema = 0.5 * meter.ema + meter.total
        return x * 2

    return kept(body, meter)


def running_mean() -> Program:
    state = {"total": 0.0, "n": 0, "correct": 0}

    def body(x: Tensor) -> Any:
        state["total"] += x.mean().item() * x.size(0)
        state["correct"] += (x > 0).sum().item()
        state["n"] += x.size(0)
        return state["total"] / state["n"], {"accuracy": state["correct"] / state["n"]}

    return kept(body, state)


def sum_of_two() -> Program:
    log: dict[str, float] = {}

    def body(x: Tensor) -> Tensor:
        log["loss"] = x.mean().item() + 0.1 * x.norm().item()
        return x * 2

    return kept(body, log)


def ratio() -> Program:
    def body(x: Tensor) -> Any:
        return (x > 0).sum().item() / x.abs().sum().item(), [x.sum().item() - 1, -x.sum().item()]

    return kept(body, None)


def functions_of_math() -> Program:
    log: dict[str, float] = {}

    def body(x: Tensor) -> Tensor:
        loss = x.abs().mean().item()
        log["log"], log["perplexity"] = math.log(loss), math.exp(min(3.0, 2.0) * loss)
        return x * 2

    return kept(body, log)


def texts() -> Program:
    lines: list[Any] = []

    def body(x: Tensor) -> Any:
        loss = x.mean().item()
        lines.append(f"{loss:.4f}")
        return str(loss), "loss " + format(loss, ".2e"), round(loss, 2), round(loss * 100)

    return kept(body, lines)


def appended() -> Program:
    values: list[float] = []
    steps = 4

    def body(x: Tensor) -> Tensor:
        values.append(x.mean().item() / steps)
        return x * 2

    return kept(body, values)


def read_after_it_was_put() -> Program:
    state = {"a": 0.0, "b": 1.0}

    def body(x: Tensor) -> Any:
        state["a"] = state["a"] * 0.5 + x.mean().item()
        state["b"] = state["b"] + state["a"]
        state["a"] = state["a"] + 1
        return state["a"] / (abs(state["b"]) + 1)

    return kept(body, state)


def of_a_closure() -> Program:
    ema, last = 0.0, ""

    def body(x: Tensor) -> Any:
        nonlocal ema, last
        ema = 0.9 * ema + 0.1 * x.mean().item()
        last = f"{ema:.3f}"
        return x * 2, ema

    return kept(body, None)


def whole_numbers() -> Program:
    state = {"hits": 0, "last": 0, "odd": 0.0}

    def body(x: Tensor) -> Tensor:
        hits = (x > 0).sum().item()
        state["hits"], state["last"] = state["hits"] + hits - 2, 3 * hits
        state["odd"] = state["hits"] ** 2 / 7
        return x * 2

    return kept(body, state)


def reset_now_and_then() -> Program:
    meter = AverageMeter()

    def body(x: Tensor) -> Tensor:
        meter.update(x.mean().item(), x.size(0))
        return x * 2

    def change(number: int) -> None:
        if number % 12 == 11:
            meter.reset()

    return kept(body, meter, change)


def odd_values() -> Program:
    """What is in the place is another number before some calls: infinite, no number, negative zero, another type."""
    state: dict[str, Any] = {"ema": 0.5}
    others = {14: math.inf, 17: math.nan, 20: -0.0, 23: 1e308, 26: 5e-324, 29: 3, 31: True, 33: 2.0}

    def body(x: Tensor) -> Any:
        state["ema"] = state["ema"] * -0.5 + x.mean().item()
        return state["ema"] * 1e3

    def change(number: int) -> None:
        state["ema"] = others.get(number, state["ema"])

    return kept(body, state, change)


def odd_reads() -> Program:
    """The value that is read is infinite, no number or negative zero in some calls."""
    state = {"sum": 0.0, "last": 0.0}
    factors = {15: math.inf, 18: math.nan, 21: -0.0, 24: 1e30}

    def body(x: Tensor, factor: Tensor) -> Any:
        value = (x.sum() * factor).item()
        state["last"], state["sum"] = -value, state["sum"] * 0.5 + value
        return value * 3

    def arguments(number: int) -> tuple[Tensor, Tensor]:
        if number in (16, 19):
            state["sum"] = 0.0
        return draw(number), torch.tensor(factors.get(number, 1.0))

    return body, arguments, state


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        average, two_averages, decorated, by_all_names, own_average, mean_by_a_property, running_mean, sum_of_two,
        ratio, functions_of_math, texts, appended, read_after_it_was_put, of_a_closure, whole_numbers,
        reset_now_and_then, odd_values, odd_reads,
    ],
)  # fmt: skip
def test_what_python_computes_of_a_read_is_computed_anew(make: Kept) -> None:
    counters = recordings(compared(make))
    assert counters.replays >= CALLS // 2, str(counters)


def asked_for_its_class() -> Program:
    """A number that notes its uses is of another class."""
    state = {"clipped": 0.0}

    def body(x: Tensor) -> Tensor:
        loss = x.mean().item() * 2
        if type(loss) is float and loss > 0.9:
            loss = 0.9
        state["clipped"] = loss
        return x * 2

    return kept(body, state)


def given_to_operators() -> Program:
    def body(x: Tensor) -> Tensor:
        loss = x.mean().item() * 2
        return x * loss + torch.tensor(loss) + torch.full((2,), loss).sum()

    return kept(body, None)


def used_as_an_index() -> Program:
    names, state = ["few", "some", "many"] * 9, {"name": "", "length": 0}

    def body(x: Tensor) -> Tensor:
        hits: Any = (x > 0).sum().item()
        state["name"], state["length"] = names[hits], len(range(hits + 1))
        return x * 2

    return kept(body, state)


def used_as_a_key() -> Program:
    counts: dict[int, int] = {}

    def body(x: Tensor) -> Tensor:
        hits: Any = (x > 0).sum().item() * 2
        counts[hits] = counts.get(hits, 0) + 1
        return x * 2

    return kept(body, counts)


def in_a_longer_text() -> Program:
    lines: list[str] = []

    def body(x: Tensor) -> Tensor:
        loss = x.mean().item()
        lines.append(f"loss {loss:.3f} of" + "%.2f" % loss + "{:.1f}".format(loss))  # noqa: UP031, UP032
        return x * 2

    return kept(body, lines)


def drawn_beside() -> Program:
    state = {"noise": 0.0}

    def body(x: Tensor) -> Tensor:
        state["noise"] = x.mean().item() * random.random()
        return x * 2

    return kept(body, state, random.seed)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        asked_for_its_class, given_to_operators, used_as_an_index,
        used_as_a_key,
        in_a_longer_text, drawn_beside,
    ],
)  # fmt: skip
def test_number_of_which_more_comes_is_as_in_eager_code(make: Kept) -> None:
    compared(make)


def test_another_meter_in_its_place() -> None:
    """With other numbers, and with the same ones while the one before goes on elsewhere."""

    def make() -> Program:
        owner = SimpleNamespace(meter=AverageMeter(), other=AverageMeter())
        for meter in (owner.meter, owner.other):
            meter.update(0.5)

        def body(x: Tensor) -> Tensor:
            owner.meter.update(x.mean().item(), x.size(0))
            return x * 2

        def change(number: int) -> None:
            if number == 12:
                vars(owner.other).update(vars(owner.meter))
            if number in (12, 25, 31):
                owner.meter, owner.other = owner.other, owner.meter
            if number == 20:
                owner.other.update(3.5)

        return kept(body, _Both(owner), change)

    compared(make)


class _Both:
    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @property
    @override
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"meter": dict(vars(self._owner.meter)), "other": dict(vars(self._owner.other))}


def test_constants_that_change() -> None:
    def make() -> Program:
        state = SimpleNamespace(ema=0.0, decay=0.9)

        def body(x: Tensor) -> Any:
            state.ema = state.decay * state.ema + (1 - state.decay) * x.mean().item()
            return state.ema

        def change(number: int) -> None:
            state.decay = 0.5 if number > 15 else 0.9

        return kept(body, state, change)

    compared(make)


def test_what_raises_in_python_raises_where_eager_code_does() -> None:
    """Nothing that comes after it has happened, and what came before has."""

    def make() -> Program:
        state = {"before": 0.0, "log": 0.0, "after": 0.0}

        def body(x: Tensor, factor: Tensor) -> Tensor:
            value = (x.abs().sum() * factor).item()
            x.add_(1)
            state["before"] = state["before"] * 0.5 + value
            state["log"] = math.log(value)
            state["after"] = state["before"] + state["log"]
            return x * 2

        def arguments(number: int) -> tuple[Tensor, Tensor]:
            return draw(number), torch.tensor(0.0 if number in (20, 21, 30) else 1.0)

        return body, arguments, state

    assert recordings(compared(make)).replays >= CALLS // 2


def test_what_raises_beside_a_number_that_operators_get() -> None:
    """One recording serves all its values; Python raises in some calls."""
    logs: tuple[list[float], list[float]] = ([], [])

    def make(log: list[float]) -> Callable[[Tensor, float], Tensor]:
        def body(x: Tensor, rate: float) -> Tensor:
            y = x * rate
            log.append(math.log(y.abs().sum().item()))
            return y

        return body

    def outcome(function: Callable[[Tensor, float], Tensor], number: int) -> Any:
        x = torch.zeros(3) if number % 9 == 8 else torch.arange(1.0, 4.0)
        try:
            return bits(function(x, 0.1 + number / 7))
        except ValueError as error:
            return str(error)

    eager, mine = make(logs[0]), capture(make(logs[1]))
    for number in range(CALLS):
        assert outcome(mine, number) == outcome(eager, number)
    assert bits(logs[1]) == bits(logs[0])


def test_a_training_step_keeps_averages() -> None:
    """Weights, averages and texts are those of eager code."""

    def run(*, captured: bool) -> tuple[Any, list[Tensor], Any]:
        torch.manual_seed(0)
        net, meters, lines = nn.Linear(4, 2), (AverageMeter(), AverageMeter()), list[str]()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

        def step(x: Tensor) -> None:
            y = net(x)
            loss = y.pow(2).mean()
            meters[0].update(loss.item(), x.size(0))
            meters[1].update((y > 0).float().mean().item() * 100, x.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        train = capture(step) if captured else step
        with torch.enable_grad():
            for number in range(CALLS):
                train(torch.sin(torch.arange(32.0).view(8, 4) * (number + 1)))
                lines.append(str(meters[0]))
        return ([vars(one) for one in meters], lines), list(net.parameters()), train

    expected, weights, _ = run(captured=False)
    averages, own_weights, train = run(captured=True)
    assert bits(averages) == bits(expected)
    assert bits(own_weights) == bits(weights)
    if weights[0].device.type == "cpu":
        assert recordings(train).replays >= CALLS // 2, str(recordings(train))


def test_threads_with_a_meter_each() -> None:
    """The proof puts numbers into the places for a while, so it is made where no other thread may see them."""
    meters = [AverageMeter() for _ in range(3)]
    draws = [draw(number) for number in range(CALLS)]

    def use(meter: AverageMeter) -> None:
        def body(x: Tensor) -> Tensor:
            meter.update(x.mean().item(), x.size(0))
            return x * 2

        step = capture(body)
        with torch.no_grad():
            for x in draws:
                assert torch.equal(step(x), x * 2)

    threads = [threading.Thread(target=use, args=(meter,)) for meter in meters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = AverageMeter()
    for x in draws:
        expected.update(x.mean().item(), x.size(0))
    assert all(bits(vars(meter)) == bits(vars(expected)) for meter in meters)


def test_verified_replays_of_an_average() -> None:
    meter, expected = AverageMeter(), AverageMeter()

    @capture(verify="always")
    def step(x: Tensor) -> Tensor:
        meter.update(x.mean().item(), x.size(0))
        return x * 2

    for number in range(12):
        assert torch.equal(step(draw(number)), draw(number) * 2)
        expected.update(draw(number).mean().item(), draw(number).size(0))
    assert bits(vars(meter)) == bits(vars(expected))
