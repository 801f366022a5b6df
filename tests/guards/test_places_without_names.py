"""Values that go back and forth where no dict keeps them by a name: few of them are recorded once each."""

from __future__ import annotations

import collections
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import AGAIN, DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


class Slots:
    __slots__ = ("factor",)
    factor: float


Made = tuple[Callable[[], float], Callable[[float], Any]]


def slot() -> Made:
    kept = Slots()
    return lambda: kept.factor, lambda value: setattr(kept, "factor", value)


def cell() -> Made:
    factor = 0.0

    def put(value: float) -> None:
        nonlocal factor
        factor = value

    return lambda: factor, put


def context_variable() -> Made:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=0.0)
    return variable.get, variable.set


def context_variable_without_a_value() -> Made:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
    tokens = list[Any]()

    def put(value: float) -> None:
        if tokens:
            variable.reset(tokens.pop())
        if value != 2.0:
            tokens.append(variable.set(value))

    return lambda: variable.get(2.0), put


def item_of_a_list() -> Made:
    kept = [1.0, 2.0]
    return lambda: kept[1], lambda value: kept.__setitem__(1, value)


def item_of_a_deque() -> Made:
    kept = collections.deque([1.0, 2.0])
    return lambda: kept[1], lambda value: kept.__setitem__(1, value)


def member_of_a_set() -> Made:
    kept = {"a"}
    return lambda: 3.0 if "b" in kept else 2.0, lambda value: (kept.add if value == 3.0 else kept.discard)("b")


def order_of_a_list() -> Made:
    kept = [3.0, 2.0]
    return lambda: kept[0], lambda _: kept.reverse()


KINDS = (
    slot, cell, context_variable, context_variable_without_a_value, item_of_a_list, item_of_a_deque, member_of_a_set,
    order_of_a_list,
)  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_two_values(make: Callable[[], Made], every: int) -> None:
    read, put = make()

    def helper(x: Tensor) -> Tensor:
        return x * read()

    captured = capture(lambda x: helper(x) + 1)
    x = torch.ones(2, device=DEVICE)
    for number in range(30):
        if number % every == 0:
            put(2.0 if number // every % 2 else 3.0)
        assert torch.equal(captured(x), helper(x) + 1)
    counts = recordings(captured)
    assert counts.replays >= 15 * AGAIN
    assert counts.recordings <= 5


def test_a_list_that_grows_in_each_call_is_given_up() -> None:
    kept = [1.0]

    def helper(x: Tensor) -> Tensor:
        return x * sum(kept)

    captured = capture(lambda x: helper(x) + 1, silence=["CG205", "CG906"])
    x = torch.ones(2, device=DEVICE)
    for number in range(30):
        kept.append(float(number))
        assert torch.equal(captured(x), helper(x) + 1)
