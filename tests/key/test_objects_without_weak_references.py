"""Arguments that take no weak reference, as objects with slots and ``SimpleNamespace`` do: told by identity all the
same, and opened where they come and go."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


class Slots:
    __slots__ = ("calls", "factor")

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, 0


class Absent:
    __slots__ = ()


@pytest.mark.parametrize("make", [Slots, lambda factor: types.SimpleNamespace(factor=factor)], ids=["slots", "simple"])
def test_a_config_that_is_changed_and_replaced(make: Callable[[float], Any]) -> None:
    def body(x: Tensor, config: Any) -> Tensor:
        return torch.mul(x, config.factor)

    captured, config_now, x = capture(body), make(2.0), torch.ones(2, device=DEVICE)
    for change in (None, lambda one: setattr(one, "factor", 3.0), None):
        config_now = make(5.0) if change is None else config_now
        if change is not None:
            change(config_now)
        before = recordings(captured).replays
        for _ in range(5):
            assert torch.equal(captured(x, config_now), body(x, config_now))
        assert recordings(captured).replays > before


def test_what_the_body_writes_there() -> None:
    class Counting(Slots):
        __slots__ = ()

    def body(x: Tensor, config: Slots) -> tuple[Tensor, Slots]:
        config.calls += 1
        return x * config.factor, config

    captured, config_now = capture(body), Counting(2.0)
    for number in range(6):
        _, given_back = captured(torch.ones(2, device=DEVICE), config_now)
        assert given_back is config_now
        assert config_now.calls == number + 1
    assert recordings(captured).replays >= 2


def test_a_mark_for_an_absent_argument() -> None:
    absent, another = Absent(), Absent()

    def body(x: Tensor, y: Any = absent) -> Tensor:
        return x * 2 if y is absent else x * 3 if isinstance(y, Absent) else x + y

    captured, x = capture(body), torch.ones(2, device=DEVICE)
    for _ in range(6):
        for given in ((), (absent,), (another,), (2.0,)):
            assert torch.equal(captured(x, *given), body(x, *given))
    assert recordings(captured).replays >= 12


def test_a_trainer_in_a_namespace() -> None:
    trainer = types.SimpleNamespace(model=nn.Linear(2, 2, device=DEVICE), factor=2.0)

    def body(x: Tensor, trainer: Any) -> Tensor:
        result: Tensor = trainer.model(x) * trainer.factor
        return result

    captured, x = capture(body), torch.ones(1, 2, device=DEVICE)
    for change in ({}, {"factor": 3.0}, {"model": nn.Linear(2, 2, device=DEVICE)}):
        vars(trainer).update(change)
        for _ in range(5):
            assert torch.equal(captured(x, trainer), body(x, trainer))
    assert recordings(captured).replays >= 5


def test_objects_that_come_and_go_are_told_by_what_they_hold() -> None:
    class Once:
        __slots__ = ("factor",)

        def __init__(self, factor: float) -> None:
            self.factor = factor

    def body(x: Tensor, once: Once) -> Tensor:
        return x * once.factor

    captured, x = capture(body), torch.ones(2, device=DEVICE)
    for number in range(40):
        factor = float(number % 2 + 3)
        assert torch.equal(captured(x, Once(factor)), body(x, Once(factor)))
        gc.collect() if number % 8 == 0 else None
    assert recordings(captured).replays >= 10
