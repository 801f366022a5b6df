"""A number that notes what is done with it is of another class than a plain one: a body that asks for the very class of
numbers is not taken by such a run for one that does nothing else with them."""

from __future__ import annotations

import builtins
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, config, recordings
from capture.tree import thread_trees
from tests.support.training_twins import CALLS, both, data

CLASSES = {float: 1.0, int: 2.0}


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    thread_trees.forget_trees()
    with warnings.catch_warnings(), config.patch(drop_slow=False, cache=False), torch.no_grad():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class State:
    def __init__(self) -> None:
        self.step, self.rate = 0, 0.1


def by_type(rate: Any) -> bool:
    return type(rate) is float and rate > 0.5


def by_class(rate: Any) -> bool:
    return rate.__class__ is float and rate > 0.5


def by_table(rate: Any) -> bool:
    return CLASSES.get(type(rate), 3.0) == 1.0 and rate > 0.5


def by_builtins(rate: Any) -> bool:
    return builtins.type(rate) is float and rate > 0.5


def by_isinstance(rate: Any) -> bool:
    return isinstance(rate, float) and rate > 0.5


ASKING: list[Callable[[Any], bool]] = [by_type, by_class, by_table, by_builtins, by_isinstance]


def as_argument(is_large: Callable[[Any], bool]) -> Any:
    def of(wrap: Callable[[Any], Any]) -> Any:
        def body(x: Tensor, rate: float) -> Tensor:
            y = torch.relu(x * rate) + 1
            return y * 10 if is_large(rate) else y

        return wrap(body), list

    return of


def in_state(is_large: Callable[[Any], bool]) -> Any:
    def of(wrap: Callable[[Any], Any]) -> Any:
        state = State()

        def body(x: Tensor) -> Tensor:
            state.step += 1
            y = torch.relu(x * 2) + math.sqrt(2)
            y = y * 10 if is_large(state.rate) else y
            return y * 3 if state.step % 4 == 0 else y

        mine = wrap(body)

        def run(x: Tensor, rate: float) -> Any:
            state.rate = rate
            return mine(x)

        return run, lambda: [vars(state)]

    return of


def rates(number: int) -> tuple[Tensor, float]:
    return data(number), 0.1 + number * 0.0201


@pytest.mark.parametrize("program", [as_argument, in_state])
@pytest.mark.parametrize("is_large", ASKING)
def test_classes_of_numbers(is_large: Callable[[Any], bool], program: Any) -> None:
    mine = both(program(is_large), rates)
    if is_large is by_isinstance:
        assert recordings(mine).replays > CALLS // 2


def test_an_attribute_of_that_name() -> None:
    """``x.device.type`` asks no number."""

    def of(wrap: Callable[[Any], Any]) -> Any:
        def body(x: Tensor, rate: float) -> Tensor:
            return torch.relu(x * rate) + (1 if x.device.type == "meta" else 2)

        return wrap(body), list

    assert recordings(both(of, rates)).replays > CALLS // 2
