"""Numbers that are read, compared with numbers in Python state, and kept there: the best so far, patience, averages
whose decay grows, norms that are clipped."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.segments.test_bodies import CALLS, fresh
from tests.support.device import DEVICE, EXECUTES
from tests.support.observed import bits

__all__ = ["fresh"]


class Trainer:
    """Its attributes are the state; a body is a method of it."""


Body = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with config.patch(drop_slow=False):
        yield


def both(body: Body, value_of: Callable[[int], float], **state: Any) -> Any:
    """Calls beside eager ones. ``value_of``: the mean of the argument, by the number of the call."""
    captured, ours, eager = _pair(body, **state)
    for number in range(CALLS):
        x = torch.full((2, 3), value_of(number))
        assert _outcome(captured, x) == _outcome(lambda x: body(eager, x), x), number
        assert bits(vars(ours)) == bits(vars(eager)), number
    return recordings(captured)


def _pair(body: Body, **state: Any) -> tuple[Any, Trainer, Trainer]:
    ours, eager = Trainer(), Trainer()
    for trainer in (ours, eager):
        vars(trainer).update({name: _copy(value) for name, value in state.items()})
    return capture(types.MethodType(body, ours)), ours, eager


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _outcome(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return bits(function(x))
    except (ValueError, ZeroDivisionError) as error:
        return type(error), str(error)


def varied(number: int) -> float:
    """Between 0 and 2, in no order."""
    return (number * 0.618) % 1 * 2


def falling(number: int) -> float:
    return 5 / (1 + number)


def odd(number: int) -> float:
    return {15: math.nan, 18: math.inf, 21: -math.inf, 24: -0.0, 27: 0.0, 30: 1.0}.get(number, varied(number))


def best(s: Any, x: Tensor) -> Any:
    loss = x.mean().item()
    if loss < s.best:
        s.best = loss
    return x * 2


def best_by_min(s: Any, x: Tensor) -> Any:
    s.best = min(s.best, x.mean().item())
    return x * 2


def patience(s: Any, x: Tensor) -> Any:
    loss = x.mean()
    if loss.item() < s.best - 1e-4:
        s.best, s.bad = loss.item(), 0
    else:
        s.bad += 1
        if s.bad >= 5:
            s.stop = True
    return loss * 2


def patience_that_raises(s: Any, x: Tensor) -> Any:
    loss = x.mean().item()
    if loss < s.best:
        s.best, s.bad = loss, 0
    else:
        s.bad += 1
        if s.bad > 6:
            s.bad = 0
            raise ValueError(f"no better than {s.best}")
    return x * 2


def clipped(s: Any, x: Tensor) -> Any:
    norm = x.norm().item()
    if norm > 2.0:
        x = x * (2.0 / (norm + 1e-6))
    s.w.sub_(x, alpha=0.1)
    return s.w * 1


def clipped_by_min(s: Any, x: Tensor) -> Any:
    s.w.sub_(x, alpha=0.1 * min(1.0, 2.0 / (x.norm().item() + 1e-6)))
    return s.w * 1


def divided(s: Any, x: Tensor) -> Any:
    mean = x.mean().item()
    s.w.add_(x, alpha=max(1 / mean, 0.3) if mean < 1.5 else 0.7)
    return s.w * 1


def average_whose_decay_grows(s: Any, x: Tensor) -> Any:
    s.count += 1
    count = s.count.item()
    decay = min(0.6, (1 + count) / (10 + count))
    s.w.mul_(decay).add_(x, alpha=1 - decay)
    return x * 2


PROGRAMS: dict[Body, dict[str, Any]] = {
    best: {"best": math.inf},
    best_by_min: {"best": math.inf},
    patience: {"best": math.inf, "bad": 0, "stop": False},
    patience_that_raises: {"best": math.inf, "bad": 0},
    clipped: {"w": torch.ones(2, 3)},
    clipped_by_min: {"w": torch.ones(2, 3)},
    divided: {"w": torch.ones(2, 3)},
    average_whose_decay_grows: {"w": torch.ones(2, 3), "count": torch.zeros((), dtype=torch.long)},
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("value_of", [varied, falling, odd])
@pytest.mark.parametrize("body", PROGRAMS, ids=lambda body: body.__name__)
def test_answers_and_formulas_together(body: Body, value_of: Callable[[int], float]) -> None:
    counters = both(body, value_of, **PROGRAMS[body])
    if EXECUTES:
        assert counters.replays > CALLS // 2, counters


@pytest.mark.parametrize("seed", [1, 2])
def test_a_place_that_holds_the_same_value_when_it_is_recorded_is_set(seed: int) -> None:
    def body(s: Any, x: Tensor) -> Any:
        above = (x > 0.6).sum().item()
        s.n += 1
        if s.n % 3 == 0:
            s.n += 1
        elif s.n != s.kept + s.kept:
            s.kept = above
            s.n += 1
        return x * s.kept

    captured, ours, eager = _pair(body, kept=0.7, n=0)
    for number in range(CALLS):
        x = torch.rand(4, 3, generator=torch.Generator("cpu").manual_seed(seed * 1000 + number), device="cpu")
        x = x.to(DEVICE) + 0.1
        assert bits(captured(x)) == bits(body(eager, x)), number
        assert bits(vars(ours)) == bits(vars(eager)), number


@pytest.mark.parametrize(("value", "first", "then"), [(0.0, 0.5, 0.7), (math.nan, 0.5, math.inf), (math.inf, 2.0, 3.0)])
def test_formulas_of_other_keys_that_give_the_same_of_one_value(value: float, first: float, then: float) -> None:
    """As 0 times any factor."""
    factor = [first]

    def body(s: Any, x: Tensor) -> Tensor:
        s.log += (x.mean().item() * factor[0],)
        return x * 2

    def value_of(number: int) -> float:
        factor[0] = first if number < 12 else then
        return value if number in range(12, 17) else varied(number)

    both(body, value_of, log=())

    def logged(s: Any, x: Tensor) -> Tensor:
        s.last = x.mean().item() - factor[0]
        s.other = x.mean().item() * factor[0]
        return x * 2

    both(logged, value_of, last=0.0, other=0.0)


def as_a_text(s: Any, x: Tensor) -> Tensor:
    s.text = "%.0f" % x.mean().item()  # noqa: UP031 - that is what is tried
    return x * 2


def compared_as_a_text(s: Any, x: Tensor) -> Tensor:
    s.last = x.mean().item()
    return x * 3 if "%.0f of %s" % (s.last, "it") == "1 of it" else x * 2  # noqa: UP031


@pytest.mark.parametrize("body", [as_a_text, compared_as_a_text], ids=lambda body: body.__name__)
@pytest.mark.parametrize("low", [0.1, 0.3])
def test_a_text_that_tells_little_of_a_number(body: Body, low: float) -> None:
    both(body, lambda number: low + varied(number) * (0.05 if number < 12 else 1), text="", last=0.0)
