"""A number that is read and kept in Python state, such as a loss in a list, is read anew in each replay."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.segments.bodies import Program, draw
from tests.segments.test_bodies import CALLS, compared, fresh
from tests.support.device import EXECUTES
from tests.support.observed import bits

__all__ = ["fresh"]
Kept = Callable[[], Program]


def kept(body: Callable[..., Any], state: Any) -> Program:
    return body, lambda number: (draw(number),), state


def appended() -> Program:
    losses: list[float] = []

    def body(x: Tensor) -> Tensor:
        y = x * 2
        losses.append(y.sum().item())
        return y

    return kept(body, losses)


def appended_as_floats() -> Program:
    log: dict[str, Any] = {"loss": [], "most": deque(maxlen=3), "steps": 0}

    def body(x: Tensor) -> Any:
        y = x * 2
        log["loss"].append(float(y.mean()))
        log["steps"] += 1
        return y.sum().item(), float(y.max())

    return kept(body, log)


def appended_and_returned() -> Program:
    losses: list[float] = []

    def body(x: Tensor) -> Any:
        loss = (x * 2).sum().item()
        losses.append(loss)
        return {"loss": loss}

    return kept(body, losses)


def added_lists() -> Program:
    log: dict[str, list[float]] = {"clipped": []}

    def body(x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            log["clipped"] += [(y > 1).float().mean().item()]
        return y

    return kept(body, log)


def rows() -> Program:
    history: list[Any] = []

    def body(x: Tensor) -> Tensor:
        y = x * 2
        history.append({"loss": y.sum().item(), "rows": len(x)})
        history.append((y.mean().item(), y.max().item()))
        return y

    return kept(body, history)


def attributes() -> Program:
    last = SimpleNamespace(loss=0.0, best=None)

    def body(x: Tensor) -> Tensor:
        y = x * 2
        last.loss = y.sum().item()
        last.most = int(y.argmax())
        return y + 1

    return kept(body, last)


def sums() -> Program:
    stats: dict[str, Any] = {"loss": 0.0, "right": 0, "steps": 0}

    def body(x: Tensor) -> Tensor:
        y = x * 2
        stats["loss"] += y.sum().item() * len(x)
        stats["right"] += (y > 1).sum().item()
        stats["steps"] += 1
        return y

    return kept(body, stats)


def sums_on_an_object() -> Program:
    meter = SimpleNamespace(total=0.0, count=0, percent=0.0)

    def body(x: Tensor) -> Any:
        y = x * 2
        meter.total = meter.total + float(y.mean()) * x.size(0)
        meter.count += x.shape[0]
        meter.percent = 100.0 * y.mean().item() / x.shape[0]
        return y

    return kept(body, meter)


def computed_and_appended() -> Program:
    losses: list[float] = []
    scale = 4

    def body(x: Tensor) -> Any:
        loss = (x * 2).sum().item() / 3
        losses.append(loss * scale)
        return {"loss": loss, "percent": 100 * loss - 1}

    return kept(body, losses)


def sum_that_is_looked_at() -> Program:
    stats = {"loss": 0.0}

    def body(x: Tensor) -> Any:
        stats["loss"] += x.sum().item()
        return x * 2 if stats["loss"] > 3 else x * 3

    return kept(body, stats)


def sum_that_is_returned() -> Program:
    stats = SimpleNamespace(loss=0.0)

    def body(x: Tensor) -> Any:
        total = stats.loss + x.sum().item()
        stats.loss = total
        return x * 2, total

    return kept(body, stats)


def sum_of_another_place() -> Program:
    stats = SimpleNamespace(loss=0.0, other=1.0)

    def body(x: Tensor) -> Any:
        stats.loss = stats.other + x.sum().item()
        stats.other += 1.0
        return x * 2

    return kept(body, stats)


def factor_that_moves() -> Program:
    stats = SimpleNamespace(loss=0.0, count=0)

    def body(x: Tensor) -> Any:
        value = x.sum().item()
        stats.count += 2
        stats.loss = value * stats.count
        return x * 2

    return kept(body, stats)


def factor_that_is_read() -> Program:
    stats = SimpleNamespace(loss=0.0)

    def body(x: Tensor) -> Any:
        count = (x > 0).sum().item()
        stats.loss += x.sum().item() * count
        return x * 2

    return kept(body, stats)


def divisor() -> Program:
    stats = SimpleNamespace(loss=0.0)

    def body(x: Tensor) -> Any:
        stats.loss = 1 / (x.sum().item() + 1000)
        return x * 2

    return kept(body, stats)


def same_number_again() -> Program:
    last = SimpleNamespace(count=16)

    def body(x: Tensor) -> Tensor:
        last.count = int((x == x).sum())
        return x * 2

    return kept(body, last)


def items() -> Program:
    metrics: dict[str, float] = {}

    def body(x: Tensor) -> Tensor:
        y = x * 2
        metrics["loss"] = y.sum().item()
        metrics["most"] = y.max().item()
        return y

    return kept(body, metrics)


class Logged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: defaultdict[str, list[float]] = defaultdict(list, loss=[])
        self.last = 0.0

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.log(y)
        return y + 1

    @torch.no_grad()
    def log(self, y: Tensor) -> None:
        self.last = y.sum().item()
        self.history["loss"].append(y.mean().item())


def looked_at_again() -> Program:
    last = SimpleNamespace(loss=0.0)

    def body(x: Tensor) -> Any:
        y = x * 2
        last.loss = y.sum().item()
        return y + last.loss

    return kept(body, last)


def looked_at_by_a_helper() -> Program:
    losses = [0.0]

    def mean() -> float:
        return sum(losses) / len(losses)

    def body(x: Tensor) -> Tensor:
        losses.append(x.sum().item())
        return x * mean()

    return kept(body, losses)


def item_looked_at() -> Program:
    metrics: dict[str, float] = {"loss": 0.0}

    def body(x: Tensor) -> Tensor:
        metrics["loss"] = x.sum().item()
        return x * max(metrics.values())

    return kept(body, metrics)


class Clipped:
    def __init__(self) -> None:
        self._loss = 0.0

    @property
    def loss(self) -> float:
        return self._loss

    @loss.setter
    def loss(self, value: float) -> None:
        self._loss = min(value, 0.5)


def by_a_property() -> Program:
    last = Clipped()

    def body(x: Tensor) -> Tensor:
        last.loss = x.sum().item()
        return x * 2

    return kept(body, last)


class Halving(list[float]):
    @override
    def append(self, value: float) -> None:
        super().append(value / 2)


def by_its_own_append() -> Program:
    losses = Halving()

    def body(x: Tensor) -> Tensor:
        losses.append(x.sum().item())
        return x * 2

    return kept(body, losses)


def on_some_ways() -> Program:
    losses: list[float] = []

    def body(x: Tensor) -> Tensor:
        loss = x.sum().item()
        y = x * 2
        if y[0, 0] > 0:
            losses.append(loss)
        return y

    return kept(body, losses)


def twice_in_one_list() -> Program:
    losses: list[float] = []

    def body(x: Tensor) -> Tensor:
        losses.append(x.sum().item())
        losses.append(x.sum().item())
        return x * 2

    return kept(body, losses)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        appended, appended_as_floats, appended_and_returned, added_lists, rows, attributes, same_number_again, items,
        sums, sums_on_an_object, computed_and_appended, on_some_ways,
    ],
)  # fmt: skip
def test_number_that_is_kept_is_read_anew(make: Kept) -> None:
    counters = recordings(compared(make))
    assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.parametrize("make", [looked_at_again, item_looked_at])
def test_number_that_is_kept_and_that_operators_get(make: Kept) -> None:
    replays = recordings(compared(make)).replays
    assert (replays > 20) if EXECUTES else (replays == 0)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        looked_at_by_a_helper, by_its_own_append,
    ],
)  # fmt: skip
def test_number_on_which_more_depends_is_compared(make: Kept) -> None:
    assert recordings(compared(make)).replays == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        sum_that_is_returned, sum_of_another_place, factor_that_moves, divisor, twice_in_one_list,
        sum_that_is_looked_at, by_a_property,
    ],
)  # fmt: skip
def test_number_that_python_computes_with_is_equal(make: Kept) -> None:
    compared(make)


def test_number_that_is_computed_of_two_that_are_read_is_equal() -> None:
    compared(factor_that_is_read)


def test_a_training_step_logs_its_loss() -> None:
    """Weights, losses and the count of steps are those of eager code."""

    def run(*, captured: bool) -> tuple[list[float], dict[str, Any], list[Tensor], Any]:
        torch.manual_seed(0)
        net, losses, log = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), list[float](), {"steps": 0}
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(x: Tensor) -> None:
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            log["steps"] += 1

        function = capture(step) if captured else step
        with torch.enable_grad():
            for number in range(12):
                function(draw(number))
        return losses, log, [parameter.detach() for parameter in net.parameters()], function

    expected, observed = run(captured=False), run(captured=True)
    assert observed[:2] == expected[:2]
    assert all(map(torch.equal, observed[2], expected[2]))
    assert recordings(observed[3]).replays >= 6


def test_a_module_logs_in_a_method() -> None:
    def run(*, captured: bool) -> tuple[list[Any], Any]:
        net, results = Logged(), []
        function = capture(net) if captured else net
        for number in range(12):
            y = function(draw(number))
            results.append((y, net.last, [*net.history["loss"]]))
        return results, function

    expected, observed = run(captured=False), run(captured=True)
    assert bits(observed[0]) == bits(expected[0])
    assert recordings(observed[1]).replays >= 6
