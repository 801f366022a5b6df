"""Whole numbers on the right of a float, which compares and computes without asking them (``0.3 * step >= 3``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import LIFTS
from tests.support.observed import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
Body = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


def state() -> SimpleNamespace:
    return SimpleNamespace(n=0, kept=0.0, count=torch.zeros((), dtype=torch.long), weight=torch.ones(3))


def replays_of(body: Body, calls: int) -> int:
    """Calls beside eager ones, each with its own state."""
    ours, eager = state(), state()
    captured = capture(lambda x: body(ours, x))
    for number in range(calls):
        x = torch.full((3,), float(number))
        assert bits(captured(x)) == bits(body(eager, x)), number
        assert bits(vars(ours)) == bits(vars(eager)), number
    return recordings(captured).replays


def computed(s: Any, x: Tensor) -> Tensor:
    s.n += 1
    return x * 3 if 0.3 * s.n >= 3 else x * 2


def computed_beside_an_answer(s: Any, x: Tensor) -> Tensor:
    s.n += 1
    y = x + 1 if s.n % 4 == 0 else x
    return y * 3 if 0.3 * s.n >= 3 else y * 2


def compared(s: Any, x: Tensor) -> Tensor:
    s.n += 1
    y = x + 1 if s.n % 4 == 0 else x
    return y * 3 if 11.5 < s.n else y * 2  # noqa: SIM300 - what is on the left decides


def beside_a_read(s: Any, x: Tensor) -> Tensor:
    s.n += 1
    s.kept = x.mean().item()
    return x * 3 if 0.3 * s.n >= 3 else x * 2


def of_a_read(s: Any, x: Tensor) -> Tensor:
    s.count += 1
    s.kept = s.count.item()
    return x * 3 if 0.3 * s.kept >= 3 else x * 2


def summed(s: Any, x: Tensor) -> Tensor:
    s.n += 1
    y = x + 1 if s.n % 4 == 0 else x
    return y * 3 if sum([0.5, s.n]) > 12 else y * 2


def of_a_sign(s: Any, x: Tensor) -> Any:
    s.n += 1
    return x * (abs(12.5 - s.n) / (12.5 - s.n))


def as_an_index(s: Any, x: Tensor) -> Any:
    s.n += 1
    y = x + 1 if s.n % 4 == 0 else x
    return y * [3, 4][s.n % 2]


def a_length_that_is_read(s: Any, x: Tensor) -> Any:
    return x[: (x % 2 > 0).sum().item()].sum(0), s.n


def an_int_to_isinstance(s: Any, x: Tensor) -> Tensor:
    s.n += 1
    assert isinstance(s.n, int)
    return x + 1 if s.n % 4 == 0 else x * 2


def a_rate_that_is_kept(s: Any, x: Tensor) -> Any:
    s.kept = 0.05 * (1 + math.cos(math.pi * s.n / 500))
    s.weight.sub_(x, alpha=s.kept)
    s.n += 1
    return s.weight * 1


def a_mean_of_steps(s: Any, x: Tensor) -> Any:
    s.n += 1
    s.kept = s.kept + 0.25 * s.n
    return x * (2.0 * s.n), s.kept / s.n


@pytest.mark.parametrize("body", [a_rate_that_is_kept, a_mean_of_steps], ids=lambda body: body.__name__)
def test_what_a_float_makes_of_a_whole_number_follows_in_replays(body: Body) -> None:
    replays = replays_of(body, 40)
    assert replays > 20 or not LIFTS


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body", [compared, computed_beside_an_answer, beside_a_read, computed, of_a_read, summed, of_a_sign],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_what_a_float_makes_of_a_whole_number(body: Body) -> None:
    replays_of(body, 24)


@pytest.mark.parametrize(
    "body",
    [as_an_index, an_int_to_isinstance, a_length_that_is_read],
    ids=lambda body: body.__name__,
)
def test_other_whole_numbers_stay_answers(body: Body) -> None:
    assert replays_of(body, 40) > 20
