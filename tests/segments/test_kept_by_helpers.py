"""A number that is read and given to a function or method that only keeps it, as a meter or a log does, is read anew in
each replay. Where more comes of it there, or another call may put something in the same place, it is compared."""

from __future__ import annotations

import functools
import threading
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
from tests.support.observed import bits

__all__ = ["fresh"]
Kept = Callable[[], Program]


def kept(body: Callable[..., Any], state: Any) -> Program:
    return body, lambda number: (draw(number),), state


class Meter:
    """As they are written for training loops."""

    def __init__(self) -> None:
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n


class Log:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.history: list[Any] = []
        self.last: Any = None

    def log(self, key: str, value: Any) -> None:
        self.values[key] = value

    def append(self, value: Any, *, scale: int = 1) -> None:
        self.history.append({"value": value * scale})

    def all(self, metrics: dict[str, Any]) -> None:
        self.values.update(metrics)

    def through(self, value: Any) -> None:
        self.keep(value, self)

    @staticmethod
    def keep(value: Any, owner: Log) -> None:
        owner.last = value

    def number(self, value: Any) -> None:
        if isinstance(value, Tensor):
            raise TypeError(value)
        self.last = value


def a_meter() -> Program:
    meter = Meter()

    def body(x: Tensor) -> Tensor:
        y = x * 2
        meter.update(y.sum().item(), x.size(0))
        return y

    return kept(body, meter)


def a_meter_of_counts() -> Program:
    meter = Meter()
    meter.sum = 2**63 - 5

    def body(x: Tensor) -> Tensor:
        meter.update(val=int((x > 0).sum()), n=3)
        return x * 2

    return kept(body, meter)


def two_meters() -> Program:
    meters = SimpleNamespace(loss=Meter(), most=Meter())

    def body(x: Tensor) -> Tensor:
        y = x * 2
        meters.loss.update(y.mean().item(), len(x))
        meters.most.update(float(y.max()))
        return y

    return body, lambda number: (draw(number),), SimpleNamespace(
        loss=vars(meters.loss), most=vars(meters.most)
    )  # fmt: skip


def a_log_with_keys() -> Program:
    log = Log()

    def body(x: Tensor) -> Tensor:
        y = x * 2
        log.log("loss", y.sum().item())
        log.log("most", value=float(y.max()))
        log.append(y.mean().item(), scale=3)
        return y

    return kept(body, log)


def a_dict_of_metrics() -> Program:
    log = Log()

    def body(x: Tensor) -> Tensor:
        log.all({"loss": x.sum().item(), "special": (x.sum() / 0).item(), "zero": (x.sum() * 0.0).item()})
        return x * 2

    return kept(body, log)


def through_a_static_method() -> Program:
    log = Log()

    def body(x: Tensor) -> Tensor:
        log.number(x.sum().item())
        return x * 2

    return kept(body, log)


def a_function() -> Program:
    last = SimpleNamespace(loss=0.0)

    def note(value: float, factor: float = 0.5) -> None:
        last.loss = value * factor

    def body(x: Tensor) -> Tensor:
        y = x * 2
        note(y.sum().item())
        return y

    return kept(body, last)


# ------------------------------------------------------------------------------------------------- more comes of these


class Clipped(Meter):
    @override
    def update(self, val: float, n: int = 1) -> None:
        super().update(min(val, 0.5), n)


class Averages(Meter):
    avg = 0.0

    @override
    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Smoothed:
    def __init__(self) -> None:
        self.value = 0.0

    def update(self, value: float) -> None:
        self.value = 0.9 * self.value + 0.1 * value


class Bounded:
    def __init__(self) -> None:
        self._val = 0.0

    @property
    def val(self) -> float:
        return self._val

    @val.setter
    def val(self, value: float) -> None:
        self._val = min(value, 0.5)

    def update(self, value: float) -> None:
        self.val = value


class Dynamic:
    def __init__(self) -> None:
        self.val = 0.0

    @override
    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "half" if name == "update" else name)

    def update(self, value: float) -> None:
        self.val = value

    def half(self, value: float) -> None:
        self.val = value / 2


def of_class(make: Callable[[], Any]) -> Kept:
    def program() -> Program:
        meter = make()

        def body(x: Tensor) -> Tensor:
            meter.update(x.sum().item())
            return x * 2

        return kept(body, meter)

    return program


def the_best_one() -> Program:
    last = SimpleNamespace(best=-1e9)

    def note(value: float) -> None:
        if value > last.best:
            last.best = value

    def body(x: Tensor) -> Tensor:
        note(x.sum().item())
        return x * 2

    return kept(body, last)


def returned_and_used() -> Program:
    last = SimpleNamespace(loss=0.0)

    def note(value: float) -> float:
        last.loss = value
        return value

    def body(x: Tensor) -> Any:
        return x * note(x.sum().item())

    return kept(body, last)


def by_all_names() -> Program:
    log = Log()

    def note(**metrics: float) -> None:
        log.values.update(metrics)

    def body(x: Tensor) -> Tensor:
        note(loss=x.sum().item())
        return x * 2

    return kept(body, log)


def wrapped() -> Program:
    log = Log()

    def doubled(function: Callable[[float], None]) -> Callable[[float], None]:
        @functools.wraps(function)
        def run(value: float) -> None:
            function(value * value)

        return run

    @doubled
    def note(value: float) -> None:
        log.last = value

    def body(x: Tensor) -> Tensor:
        note(x.sum().item())
        return x * 2

    return kept(body, log)


def read_by_the_next_call() -> Program:
    log = Log()
    log.values["loss"] = 1.0

    def body(x: Tensor) -> Tensor:
        y: Tensor = x * log.values["loss"]
        log.log("loss", x.sum().item())
        return y

    return kept(body, log)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        a_meter, a_meter_of_counts, two_meters, a_log_with_keys, a_dict_of_metrics, through_a_static_method, a_function,
    ],
)  # fmt: skip
def test_number_that_a_helper_keeps_is_read_anew(make: Kept) -> None:
    counters = recordings(compared(make))
    assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        of_class(Clipped), of_class(Averages), of_class(Smoothed), of_class(Bounded), of_class(Dynamic), the_best_one,
        returned_and_used, by_all_names, wrapped, read_by_the_next_call,
    ],
)  # fmt: skip
def test_number_of_which_a_helper_makes_more_is_as_eager(make: Kept) -> None:
    compared(make)


Body = Callable[[Any, Any, Tensor], None]


def reset_by_another_call(meter: Meter, log: Log, x: Tensor) -> None:
    meter.update((x > 1).sum().item())
    meter.update(0)


def reset_by_an_alias(meter: Meter, log: Log, x: Tensor) -> None:
    put = meter.update
    put((x > 1).sum().item())
    put(0)


def reset_in_a_loop(meter: Meter, log: Log, x: Tensor) -> None:
    for at in range(2):
        value = 0
        if not at:
            value = int((x > 1).sum())
        meter.update(value)


def reset_by_its_key(meter: Meter, log: Log, x: Tensor) -> None:
    log.log("bad", (x > 1).sum().item())
    log.values["bad"] = 0


def reset_by_the_same_method(meter: Meter, log: Log, x: Tensor) -> None:
    log.log("bad", (x > 1).sum().item())
    for key in ("bad", "good"):
        log.log(key, 0)


def reset_from_a_list(meter: Meter, log: Log, x: Tensor) -> None:
    meter.update((x > 1).sum().item())
    list(map(meter.update, [0]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [
        reset_by_another_call, reset_by_an_alias, reset_in_a_loop, reset_by_its_key, reset_by_the_same_method,
        reset_from_a_list,
    ],
)  # fmt: skip
def test_place_that_another_call_may_set(body: Body) -> None:
    """At first both are 0, so that what is left does not tell which of them it is."""

    def run(*, captured: bool) -> list[Any]:
        meter, log, left = Meter(), Log(), list[Any]()

        def step(x: Tensor) -> Tensor:
            body(meter, log, x)
            return x * 2

        function = capture(step) if captured else step
        for number in range(24):
            meter.val, log.values["bad"] = 5.0, 5
            function(torch.full((3,), 2.0 if number in (9, 12, 13, 20) else 0.0))
            left.append((meter.val, meter.sum, meter.count, dict(log.values)))
        return left

    assert run(captured=True) == run(captured=False)


def test_a_meter_that_is_reset_replaced_and_read_by_another_thread() -> None:
    """A method that is replaced is another one; an exception between two calls leaves what eager leaves."""

    def run(*, captured: bool) -> tuple[list[Any], Any]:
        net: Any = nn.Module()
        net.meter = Meter()
        seen: list[Any] = []

        def step(x: Tensor) -> Tensor:
            y = x * 2
            net.meter.update(y.sum().item(), x.size(0))
            return y.reshape(-1, 4)

        function = capture(step) if captured else step
        for number in range(30):
            if number == 10:
                net.meter.__init__()
            if number == 14:
                net.meter = Meter()
            if number == 20:
                Meter.update = doubling  # type: ignore[method-assign]
            try:
                seen.append(function(draw(number, 3, 3) if number == 17 else draw(number)))
            except RuntimeError as error:
                seen.append(str(error))
            reader = threading.Thread(target=lambda: seen.append(dict(vars(net.meter))))
            reader.start()
            reader.join()
        return seen, function

    own = Meter.update

    def doubling(self: Meter, val: float, n: int = 1) -> None:
        self.val = val * 2

    observed: list[Any] = []
    for captured in (False, True):
        try:
            observed.append(run(captured=captured))
        finally:
            Meter.update = own  # type: ignore[method-assign]
    assert bits(observed[1][0]) == bits(observed[0][0])
    assert recordings(observed[1][1]).replays >= 5
