"""A number that is read and put into a dict by ``update`` or ``|=`` is read anew in each replay, as one that is put
there by its key; and so is no number in whose place something else may be by the end of the body."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
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


def by_names() -> Program:
    log: dict[str, Any] = {}

    def body(x: Tensor) -> Tensor:
        y = x * 2
        log.update(loss=y.sum().item(), most=float(y.max()), rows=len(x))
        return y

    return kept(body, log)


def by_a_dict() -> Program:
    log: dict[str, Any] = {"loss": 0.0}

    def body(x: Tensor) -> Tensor:
        y = x * 2
        log.update({"loss": y.sum().item()})
        log.update({"most": y.max().item(), "percent": 100 * y.mean().item()})
        return y

    return kept(body, log)


def by_a_dict_and_names() -> Program:
    log = OrderedDict[str, Any]()

    def body(x: Tensor) -> Tensor:
        y = x * 2
        log.update({"loss": y.sum().item(), "rows": 3}, most=y.max().item())
        return y

    return body, lambda number: (draw(number),), log


def by_an_operator() -> Program:
    state: dict[str, Any] = {"log": {"loss": 0.0}}

    def body(x: Tensor) -> Tensor:
        y = x * 2
        state["log"] |= {"loss": y.sum().item()}
        state["log"] |= {"most": y.max().item(), "least": y.min().item()}
        return y

    return kept(body, state)


def by_an_operator_on_an_attribute() -> Program:
    last = SimpleNamespace(log=defaultdict(float))

    def body(x: Tensor) -> Tensor:
        y = x * 2
        last.log |= {"loss": y.sum().item()}
        last.log.update(count=int((y > 0).sum()))
        return y

    return kept(body, last)


def with_the_result() -> Program:
    log: dict[str, Any] = {}

    def body(x: Tensor) -> Any:
        metrics = {"loss": x.sum().item()}
        log.update(loss=metrics["loss"], finite=bool(x.isfinite().all()))
        return metrics

    return kept(body, log)


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {"step": 0}

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.logs["step"] += 1
        self.report(y)
        return y

    def report(self, y: Tensor) -> None:
        self.logs.update(loss=y.sum().item(), special=(y.sum() / 0).item(), zero=(y.sum() * -0.0).item())


# ------------------------------------------------------------------------------------------------- more comes of these


class Halving(dict[str, float]):
    @override
    def update(self, *args: Any, **kwargs: float) -> None:
        super().update({key: value / 2 for key, value in kwargs.items()})


def by_its_own_update() -> Program:
    log = Halving()

    def body(x: Tensor) -> Tensor:
        log.update(loss=x.sum().item())
        return x * 2

    return kept(body, log)


def by_a_counter() -> Program:
    counts = Counter[str](seen=0)

    def body(x: Tensor) -> Tensor:
        counts.update(seen=int((x > 0).sum()))
        return x * 2

    return kept(body, counts)


def looked_at_by_the_next_call() -> Program:
    log: dict[str, float] = {"loss": 0.0}

    def body(x: Tensor) -> Tensor:
        y = x * log["loss"]
        log.update(loss=x.sum().item())
        return y

    return kept(body, log)


def looked_at_as_a_whole() -> Program:
    log: dict[str, float] = {"loss": 0.0}

    def body(x: Tensor) -> Tensor:
        log.update(loss=x.sum().item())
        return x * max(log.values())

    return kept(body, log)


def under_a_key_that_was_read() -> Program:
    counts: dict[int, float] = {}

    def body(x: Tensor) -> Tensor:
        counts.update({int(x.argmax()): 1.0})
        return x * 2

    return kept(body, counts)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        by_names, by_a_dict, by_a_dict_and_names, by_an_operator, by_an_operator_on_an_attribute, with_the_result,
    ],
)  # fmt: skip
def test_number_that_is_put_into_a_dict_is_read_anew(make: Kept) -> None:
    counters = recordings(compared(make))
    assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        by_its_own_update, by_a_counter, looked_at_by_the_next_call, looked_at_as_a_whole, under_a_key_that_was_read,
    ],
)  # fmt: skip
def test_number_on_which_more_depends_is_compared(make: Kept) -> None:
    compared(make)


def test_a_module_logs_by_update() -> None:
    def run(*, captured: bool) -> tuple[list[Any], Any]:
        net, results = Trainer(), []
        function = capture(net) if captured else net
        for number in range(20):
            y = function(draw(number))
            if number == 12:
                net.logs["note"] = "another key"
            if number == 15:
                net.logs.clear()
                net.logs["step"] = 2**63 - 1
            results.append((y, [*net.logs.items()]))
        return results, function

    expected, observed = run(captured=False), run(captured=True)
    assert bits(observed[0]) == bits(expected[0])
    assert recordings(observed[1]).replays >= 6


Reset = Callable[[Any, Tensor], Tensor]


def overwrites_an_attribute(log: Any, x: Tensor) -> Tensor:
    log.bad = int((x > 1).sum())
    log.bad = 0
    return x * 2


def overwrites_an_item(log: Any, x: Tensor) -> Tensor:
    log.stats["bad"] = (x > 1).sum().item()
    log.stats["bad"] = 0
    return x * 2


def overwrites_by_update(log: Any, x: Tensor) -> Tensor:
    log.stats.update(bad=(x > 1).sum().item())
    log.stats.update(bad=0)
    return x * 2


def overwrites_in_a_helper(log: Any, x: Tensor) -> Tensor:
    log.stats["bad"] = (x > 1).sum().item()
    forget(log)
    return x * 2


def forget(log: Any) -> None:
    log.stats["bad"] = 0


def overwrites_with_another_read(log: Any, x: Tensor) -> Tensor:
    log.bad = (x > 1).sum().item()
    log.bad = (x > 100).sum().item()
    return x * 2


def overwrites_in_a_loop(log: Any, x: Tensor) -> Tensor:
    for at in range(2):
        bad = 0
        if at == 0:
            bad = int((x > 1).sum())
        log.bad = bad
    return x * 2


def adds_twice(log: Any, x: Tensor) -> Tensor:
    log.stats["bad"] += (x > 1).sum().item()
    log.stats["bad"] += 2 * int((x > 1).sum())
    return x * 2


def adds_twice_in_one_place(log: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        log.bad += int((x > 1).sum())
    return x * 2


def overwrites_by_name(log: Any, x: Tensor) -> Tensor:
    log.bad = (x > 1).sum().item()
    setattr(log, "bad", 0)  # noqa: B010
    return x * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [
        overwrites_an_attribute, overwrites_an_item, overwrites_by_update, overwrites_in_a_helper,
        overwrites_with_another_read, overwrites_in_a_loop, adds_twice, adds_twice_in_one_place, overwrites_by_name,
    ],
)  # fmt: skip
def test_place_that_gets_another_value_after_the_one_that_was_read(body: Reset) -> None:
    """At first both are 0, so that what is left does not tell which of them it is."""

    def run(*, captured: bool) -> list[Any]:
        log, left = SimpleNamespace(bad=5, stats={"bad": 5}), list[Any]()

        def step(x: Tensor) -> Tensor:
            return body(log, x)

        function = capture(step) if captured else step
        for number in range(24):
            log.bad = log.stats["bad"] = 5
            function(torch.full((3,), 2.0 if number in (9, 12, 13, 20) else 0.0))
            left.append((log.bad, dict(log.stats)))
        return left

    assert run(captured=True) == run(captured=False)
