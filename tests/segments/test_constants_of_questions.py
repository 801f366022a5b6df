"""Numbers that the host reads are compared with constants in Python state, which change later: what a recording asks is
about the constant of its own key, not about one that another key had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import config
from tests.runtime.test_decisions import Step, Wrap, twins

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


class Gate(nn.Module):
    """Asks something of what it reads, in a function that the captured one calls."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.threshold, self.margin = form, 0.0, 1
        self.seen: Any = None

    @override
    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        result: Tensor = getattr(self, self.form)(x, v)
        return result

    def less(self, x: Tensor, v: Tensor) -> Tensor:
        return x * 2 if v.item() < self.threshold else x * 1

    def in_state(self, x: Tensor, v: Tensor) -> Tensor:
        self.seen = "low" if v.item() < self.threshold else "high"
        return x * 1

    def largest(self, x: Tensor, v: Tensor) -> Tensor:
        return x * max(v.item(), self.threshold)

    def clipped(self, x: Tensor, v: Tensor) -> Tensor:
        return x * min(max(v.item(), self.threshold - self.margin), self.threshold + self.margin)

    def near(self, x: Tensor, v: Tensor) -> Tensor:
        return x + 1 if abs(v.item() - self.threshold) <= self.margin else x - 1

    def equal(self, x: Tensor, v: Tensor) -> Tensor:
        return x + 1 if v.item() == self.threshold else x - 1

    def in_turn(self, x: Tensor, v: Tensor) -> Tensor:
        a = v.item()
        if a < 0:
            return x * 3
        return x * 2 if a < self.threshold else x * 1

    def loop(self, x: Tensor, v: Tensor) -> Tensor:
        a = v.item()
        while a < self.threshold:
            a, x = a + 1, x * 2
        return x * 1


FORMS = ["less", "in_state", "largest", "clipped", "near", "equal", "in_turn", "loop"]


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.gate, self.layer = Gate(form), nn.Linear(2, 2)

    @override
    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        result: Tensor = self.gate(self.layer(x), v)
        return result


def program_of(form: str, thresholds: Callable[[int], Any], read: Callable[[int], float]) -> Callable[[Wrap], Step]:
    def program(wrap: Wrap) -> Step:
        torch.manual_seed(0)
        model = Model(form)
        f = wrap(model)

        def step(n: int) -> Any:
            model.gate.threshold = thresholds(n)
            return f(torch.ones(1, 2), torch.tensor(read(n))), model.gate.seen

        return step

    return program


@pytest.mark.parametrize("form", FORMS)
def test_a_threshold_changes_once(form: str) -> None:
    read = lambda n: 7.0 if n < 30 else [3.0, 3.0, 7.0, -1.0][n % 4]  # noqa: E731
    assert twins(program_of(form, lambda n: 0.0 if n < 20 else 5.0, read)) > 10


@pytest.mark.parametrize("form", FORMS)
def test_a_threshold_goes_back_and_forth(form: str) -> None:
    twins(program_of(form, lambda n: (0.0, 5.0, 2.0)[n // 8 % 3], lambda n: [7.0, 3.0, -1.0, 1.0, 5.0][n * 3 % 5]), 90)


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_threshold(form: str) -> None:
    twins(program_of(form, lambda n: (3, 7)[n // 12 % 2], lambda n: float(n % 9)), 60)


def test_a_counter_of_patience() -> None:
    """The best value so far was once infinite."""
    values = [-torch.inf, torch.inf, 5.0, 5.0, 5.0, 5.0, 1.0, torch.inf, 5.0, torch.inf, 5.0, 5.0, -torch.inf]

    class Stop:
        best, bad = 0.0, 0

        def __call__(self, x: Tensor, v: Tensor) -> Tensor:
            a = v.item()
            if a < self.best:
                self.best, self.bad = a, 0
            else:
                self.bad += 1
            if self.bad >= 3:
                self.bad, self.best = 0, 10.0
            return x * 1

    def program(wrap: Wrap) -> Step:
        stop = Stop()
        f = wrap(lambda x, v: stop(x, v))
        return lambda n: (f(torch.ones(2), torch.tensor(values[n % len(values)])), stop.best, stop.bad)

    twins(program, 40)


def test_the_best_values_in_order() -> None:
    values = [torch.inf, torch.inf, torch.inf, 1.0, 5.0, torch.nan, 1.0, torch.inf, 2.0, 1.0, 0.0, 5.0]

    def program(wrap: Wrap) -> Step:
        best: list[float] = []

        def body(x: Tensor, v: Tensor) -> Tensor:
            best.append(v.item())
            best.sort()
            del best[:-3]
            return x * 2

        f = wrap(body)
        return lambda n: (f(torch.ones(2), torch.tensor(values[n % len(values)])), repr(best))

    twins(program, 40)
