"""Helpers that keep a number which was read, and containers that are filled by keys which change, while what they
depend on is changed between calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from capture import capture
from tests.segments.bodies import draw
from tests.segments.test_bodies import fresh
from tests.support.observed import bits

__all__ = ["fresh"]
Program = tuple[Callable[[Tensor], Any], Callable[[int], None], Callable[[], Any]]
"""A body, what is changed before each call, and a function that gives what the body left."""
CALLS = 60


class Meter:
    def __init__(self) -> None:
        self.val, self.total, self.count = 0.0, 0.0, 0

    def update(self, val: float, n: int = 2, *, scale: int = 1) -> None:
        self.val = val * scale
        self.total += val * n
        self.count += n


def factor_of_a_cell() -> Program:
    factor, last = 3.0, SimpleNamespace(loss=0.0)

    def note(value: float) -> None:
        last.loss = value * factor

    def body(x: Tensor) -> Tensor:
        note(x.sum().item())
        return x * 2

    def before(number: int) -> None:
        nonlocal factor
        factor = 3.0 + number // 10 if number < 40 else 3.5 + number

    return body, before, lambda: last.loss


def factor_that_the_body_counts() -> Program:
    state = SimpleNamespace(loss=0.0, step=1)

    def note(value: float, factor: int) -> None:
        state.loss = value * factor

    def body(x: Tensor) -> Tensor:
        state.step += 1
        note(x.sum().item(), state.step)
        return x * 2

    return body, lambda number: None, lambda: vars(state)


def defaults() -> Program:
    meter = Meter()

    def body(x: Tensor) -> Tensor:
        meter.update(x.sum().item())
        return x * 2

    def before(number: int) -> None:
        if number == 0:
            Meter.update.__defaults__, Meter.update.__kwdefaults__ = (2,), {"scale": 1}
        if number == 20:
            Meter.update.__defaults__ = (5,)
        if number == 40:
            Meter.update.__kwdefaults__ = {"scale": 4}
        if number == CALLS - 1:
            Meter.update.__defaults__, Meter.update.__kwdefaults__ = (2,), {"scale": 1}

    return body, before, lambda: vars(meter)


def method_of_the_object() -> Program:
    meter: Any = Meter()

    def body(x: Tensor) -> Tensor:
        meter.update(x.sum().item())
        return x * 2

    def before(number: int) -> None:
        if number == 20:
            meter.update = lambda val: setattr(meter, "val", val / 2)
        if number == 40:
            del meter.update

    return body, before, lambda: (meter.val, meter.total, meter.count)


def another_meter() -> Program:
    state: Any = SimpleNamespace(meter=Meter())

    def body(x: Tensor) -> Tensor:
        state.meter.update(x.sum().item())
        return x * 2

    def before(number: int) -> None:
        if number % 13 == 7:
            state.meter = Meter()
        if number == 30:
            state.meter = SimpleNamespace(update=lambda val: None, val=0.0, total=2**70, count=1)
        if number == 40:
            state.meter = Meter()
            state.meter.val, state.meter.total, state.meter.count = float("nan"), 2**70, 2**63 - 1

    return body, before, lambda: (state.meter.val, state.meter.total, state.meter.count)


def meters_of_a_list() -> Program:
    meters = [Meter(), Meter(), Meter()]

    def body(x: Tensor) -> Tensor:
        for at, meter in enumerate(meters):
            meter.update((x * at).sum().item())
        return x * 2

    def before(number: int) -> None:
        if number == 20:
            meters[1] = meters[0]
        if number == 40:
            meters.append(Meter())

    return body, before, lambda: [vars(meter) for meter in meters]


def raising_later() -> Program:
    meter = Meter()

    def body(x: Tensor) -> Tensor:
        meter.update(x.sum().item())
        if meter.count > 60:
            raise ValueError("too many")
        return x * 2

    return body, lambda number: None, lambda: vars(meter)


def under_a_key_that_changes() -> Program:
    state = SimpleNamespace(values={}, key="a")

    def log(key: str, value: float) -> None:
        state.values[key] = value

    def body(x: Tensor) -> Tensor:
        log(state.key, x.sum().item())
        log("z", x.mean().item())
        return x * 2

    def before(number: int) -> None:
        if number % 13 == 7:
            state.key = "z" if state.key == "a" else "a"

    return body, before, lambda: state.values


# --------------------------------------------------------------------------------- filled by keys that are no constants


def counted_and_set() -> Program:
    state = SimpleNamespace(values={"a": 1, "n": 2}, key="a")

    def body(x: Tensor) -> Tensor:
        state.values["n"] += 1
        state.values[state.key] = 7
        return x * 2

    def before(number: int) -> None:
        if number % 13 == 3:
            state.key = "n" if state.key == "a" else "a"

    return body, before, lambda: state.values


def put_over_the_read() -> Program:
    state: Any = SimpleNamespace(log={}, more={"bad": 0})

    def body(x: Tensor) -> Tensor:
        state.log["bad"] = int((x > 9).sum())
        state.log.update(state.more)
        return x * 2

    def before(number: int) -> None:
        if number % 9 == 3:
            state.more["bad"] = number
        if number == 30:
            state.more = {}

    return body, before, lambda: state.log


def tensors_in_a_dict() -> Program:
    state: Any = SimpleNamespace(held={}, key="a")

    def body(x: Tensor) -> Tensor:
        state.held[state.key] = x * 3
        return x * 2

    def before(number: int) -> None:
        if number % 13 == 3:
            state.key = "b" if state.key == "a" else "a"
        if number % 17 == 3:
            state.held = {}

    return body, before, lambda: state.held


class Scaled:
    def __init__(self) -> None:
        self.last, self.scale = (0, 0), 2

    def __setitem__(self, key: int, value: int) -> None:
        self.last = (key, value * self.scale)


def of_its_own_class() -> Program:
    state = SimpleNamespace(held=Scaled(), key=3)

    def body(x: Tensor) -> Tensor:
        state.held[state.key] = 4
        return x * 2

    def before(number: int) -> None:
        if number % 13 == 3:
            state.held.scale = number
        if number % 17 == 3:
            state.held = Scaled()

    return body, before, lambda: state.held.last


def a_method_with_the_name_of_a_count() -> Program:
    class Counts:
        total = 0

    class Other:
        def total(self, x: Tensor) -> Tensor:
            return x * 3

    counts, other = Counts(), Other()

    def body(x: Tensor) -> Tensor:
        counts.total += 1
        return other.total(x)

    def before(number: int) -> None:
        if number == 20:
            Other.total = lambda self, x: x * 5  # type: ignore[method-assign]
        if number == 40:
            other.total = lambda x: x * 7  # type: ignore[method-assign]

    return body, before, lambda: counts.total


def ran(make: Callable[[], Program], *, captured: bool) -> list[Any]:
    body, before, state = make()
    function, seen = capture(body) if captured else body, list[Any]()
    for number in range(CALLS):
        before(number)
        try:
            result = bits(function(draw(number)))
        except ValueError as error:
            result = str(error)
        seen.append((result, bits(state())))
    return seen


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        factor_of_a_cell, factor_that_the_body_counts, defaults, method_of_the_object, another_meter, meters_of_a_list,
        raising_later, under_a_key_that_changes, counted_and_set, put_over_the_read, tensors_in_a_dict,
        of_its_own_class, a_method_with_the_name_of_a_count,
    ],
)  # fmt: skip
def test_what_is_changed_between_calls_counts(make: Callable[[], Program]) -> None:
    assert ran(make, captured=True) == ran(make, captured=False)
