"""Bodies whose own Python raises an error for some of the numbers that they read or count, and catches it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.device import EXECUTES
from tests.support.observed import bits, fresh, x_of

__all__ = ["fresh"]

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")

CALLS = 36


def keeps_a_root(state: Any, x: Tensor) -> Tensor:
    try:
        state.last = math.sqrt(x.sum().item())
    except ValueError:
        state.last = 0.0
    return x * 2


def only_tries(state: Any, x: Tensor) -> Tensor:
    total = state.last = x.sum().item()
    try:
        math.log(total)
        state.good += 1
    except ValueError as error:
        state.text = str(error)
        return -x
    return x * 2


def refuses(state: Any, x: Tensor) -> Tensor:
    state.last = x.sum().item()
    math.log(state.last)
    return x * 2


def reads_behind_an_error(state: Any, x: Tensor) -> Tensor:
    try:
        state.last = 1 / (x.sum().item() * 0)
    except ZeroDivisionError:
        state.last = -1.0
    if x.max().item() > 1:
        state.good += 1
        return -x
    return x * 2


def divides_counts(state: Any, x: Tensor) -> Tensor:
    good, bad = (x > 0.5).sum().item(), (x < -1.2).sum().item()
    try:
        state.last = good / bad
    except ZeroDivisionError:
        state.last = -1.0
    return x + 1


def grows(state: Any, x: Tensor) -> Tensor:
    try:
        state.last = math.exp(x.abs().sum().item() * 80)
    except OverflowError:
        state.last = math.inf
    return x + 1


def counts_to_a_zero(state: Any, x: Tensor) -> Tensor:
    state.good += 1
    if state.good % 4 == 0:
        x = x + 1
    try:
        1 / (state.good - 20)
    except ZeroDivisionError:
        return -x
    return x * 2


def gives_its_count(state: Any, x: Tensor) -> Tensor:
    state.good += 1
    try:
        1 / (state.good - 20)
    except ZeroDivisionError:
        return -x
    count: int = state.good
    return x * count


def some(number: int, x: Tensor) -> Tensor:
    return x


def first(number: int, x: Tensor) -> Tensor:
    return -x.abs() if number < 3 else x.abs()


def third(number: int, x: Tensor) -> Tensor:
    return x.abs() * (math.nan if number == 2 else 1)


def late(number: int, x: Tensor) -> Tensor:
    return -x.abs() if number % 11 == 10 else x.abs()


def run(body: Callable[[Any, Tensor], Any], given: Callable[[int, Tensor], Tensor], **options: Any) -> Any:
    state = SimpleNamespace(last=0.0, good=0, text="")

    def program(x: Tensor) -> Any:
        return body(state, x)

    called = capture(program, **options) if options else program
    seen = list[Any]()
    for number in range(CALLS):
        try:
            result = bits(called(given(number, x_of(number, 2, 3))))
        except ValueError as error:
            result = str(error)
        seen.append((result, repr(vars(state))))
    return seen, called


@pytest.mark.one_in(8)
@pytest.mark.parametrize("verify", ["off", "first", "always"])
@pytest.mark.parametrize("given", [some, first, third, late])
@pytest.mark.parametrize(
    "body",
    [
        keeps_a_root,
        only_tries,
        refuses,
        reads_behind_an_error,
        divides_counts,
        grows,
        counts_to_a_zero,
        gives_its_count,
    ],
)
def test_errors_that_numbers_raise(body: Callable[..., Any], given: Callable[..., Any], verify: str) -> None:
    expected, _ = run(body, given)
    seen, called = run(body, given, verify=verify)
    assert seen == expected
    if EXECUTES and verify == "off" and body in (only_tries, counts_to_a_zero):
        assert recordings(called).replays >= 20, recordings(called)


@pytest.mark.parametrize("divisor", [9, 9.0])
def test_an_argument_that_raises(divisor: float) -> None:
    def body(x: Tensor, number: int) -> Tensor:
        try:
            1 / (number - divisor)
        except ZeroDivisionError:
            return -x
        return x * 3 if number % 3 == 0 else x * 2

    called, x = capture(body), torch.ones(3)
    for number in range(24):
        assert torch.equal(called(x, number), body(x, number)), number
    if EXECUTES:
        assert recordings(called).replays >= 12, recordings(called)
