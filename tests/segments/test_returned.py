"""A number that is read last and only returned is read anew in each replay; any other is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, recordings
from tests.segments.bodies import Program, draw
from tests.segments.test_bodies import CALLS, compared, fresh, says_that_it_gave_up
from tests.support.device import DEVICE
from tests.support.observed import bits

__all__ = ["fresh"]


def alone(x: Tensor) -> float:
    return (x * 2).sum().item()


def in_a_tuple(x: Tensor) -> Any:
    y = x * 2
    return y, y.sum().item()


def by_name(x: Tensor) -> Any:
    y = x * 2 if x[0, 0] > 0 else x * 3
    mean = y.mean()
    loss = y.sum().item()
    total = [y, loss]
    return {"total": total, "plain": mean}


def after_a_write(x: Tensor) -> Any:
    x.add_(1)
    n = (x > 0).sum().item()
    return x, {"n": n}


def twice(x: Tensor) -> Any:
    loss = x.sum().item()
    return x * 2, loss, [loss]


def metrics(x: Tensor) -> Any:
    y = x * 2
    return {"loss": y.sum().item(), "most": y.max().item(), "mean": y.mean()}


def one_metric(x: Tensor) -> Any:
    return {"loss": (x * 2).sum().item()}


def last_of_two(x: Tensor) -> Any:
    return {"y": x * 2, "loss": x.sum().item()}


def between_operators(x: Tensor) -> Any:
    loss = x.sum().item()
    x.add_(1)
    share = (x > 0).float().mean().item()
    return x * 2, loss, [share]


def after_a_branch(x: Tensor) -> Any:
    y = x * 2
    least = y.min().item()
    if y[0, 0] > 0:
        y = y + 1
    return y, y.sum().item(), {"least": least}


def in_a_block(x: Tensor) -> Any:
    y = x * 2
    with torch.no_grad():
        return y, y.sum().item()


def looked_for(x: Tensor) -> Any:
    loss = x.sum().item()
    names = sorted(locals())
    return x * 2, loss, len(names)


def as_float(x: Tensor) -> Any:
    y = x * 2
    return {"loss": float(y.sum()), "y": y}


def as_floats(x: Tensor) -> Any:
    y = x * 2
    loss, n = float(y.mean()), float((y > 0).sum())
    return y, loss, [n]


def as_float_alone(x: Tensor) -> float:
    y = (x * 2).sum()
    return float(y)


def float_below_others(x: Tensor) -> Any:
    y = x * 2
    return y, [float(y.sum()), float(torch.stack([y.min(), y.max()]).mean())]


def as_int(x: Tensor) -> Any:
    return x * 2, int(x.argmax()), bool((x > 0).all())


def as_int_of_a_fraction(x: Tensor) -> Any:
    return x * 2, int(x.sum() * 100)


def as_float_and_more(x: Tensor) -> Any:
    return x * 2, float(x.sum()) + 1


def own_float(x: Tensor) -> Any:
    float = _doubled  # noqa: A001
    return x * 2, float(x.sum())


def _doubled(x: Tensor) -> Any:
    return 2 * x.item()


def given_to_a_call(x: Tensor) -> Any:
    loss = x.sum().item()
    return x * 2, abs(loss)


def same_name(x: Tensor) -> Any:
    return {"a": x.sum().item(), "a": x.max().item()}  # noqa: F601


def returned_twice(x: Tensor) -> Any:
    y = x * 2
    loss = y.sum().item()
    return y, loss, [loss]


def formatted(x: Tensor) -> Any:
    y = x * 2
    return y, f"{y.sum().item():.3f}"


def negated(x: Tensor) -> Any:
    y = x * 2
    loss = y.sum().item()
    return y, -loss


def as_a_key(x: Tensor) -> Any:
    y = x * 2
    return {y.sum().item(): y}


def chosen(x: Tensor) -> Any:
    y = x * 2
    loss = y.sum().item()
    return y if loss else loss


def _read(y: Tensor) -> float:
    return y.sum().item()


def by_a_helper(x: Tensor) -> Any:
    y = x * 2
    return y, -_read(y)


def _metrics(y: Tensor) -> Any:
    loss, most = y.sum().item(), y.argmax().item()
    return {"loss": loss, "most": most}


def by_helpers(x: Tensor) -> Any:
    y = x * 2
    found = _metrics(y)
    loss, least = _both(y)
    return y, found["loss"], loss, _read(y), [found, least]


def _both(y: Tensor) -> Any:
    return _read(y), y.min().item()


@torch.no_grad()
def below_a_decorator(x: Tensor) -> Any:
    y = x * 2
    return y, {"loss": y.sum().item()}


class Net(torch.nn.Module):
    @override
    def forward(self, x: Tensor) -> Any:
        return x * 2, self.read(x)

    def read(self, x: Tensor) -> float:
        return float(x.sum())


_net = Net()


def by_modules(x: Tensor) -> Any:
    y, loss = _net(x)
    return y, [loss]


def before_ways(x: Tensor, more: bool = False) -> Any:
    y = x * 2
    loss = y.sum().item()
    for _ in range(3):
        y = y + 1
    if more:
        return y, loss
    try:
        y = y * 2
    finally:
        logged = {"loss": loss}
    return y, loss if y.dim() > 5 else logged["loss"]


def other_ways(x: Tensor) -> Any:
    y = x * 2
    loss = y.sum().item()
    if len(x) > 100:
        loss = 2.0
    return y, loss


def by_code_in_c(x: Tensor) -> Any:
    return x * 2, max([x, x + 1], key=_read)


def by_code_in_c_alone(x: Tensor) -> Any:
    return [*map(_read, [x, x + 1])]


def with_more_of_a_helper(x: Tensor) -> Any:
    found = _metrics(x)
    return x * 2, found["most"], found["loss"] + 1.5


def kept_by_others(x: Tensor) -> Any:
    global _kept
    _kept = _read(x)
    return x * 2


_kept = 0.0


def by_a_captured_helper(x: Tensor) -> Any:
    y = x * 2
    return y, -_captured(y)


def dropped(x: Tensor) -> Any:
    y = x * 2
    loss = y.sum().item()
    loss = 2.0
    return y, loss


_captured = capture(_read)


def program(body: Callable[..., Any]) -> Callable[[], Program]:
    return lambda: (body, lambda number: (draw(number),), None)


def test_a_default_device_stands_not_between() -> None:
    """A default device adds Python code to calls of torch's functions, and the value is still read anew."""
    with torch.device(DEVICE):
        counters = recordings(compared(program(in_a_tuple)))
    assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "body",
    [
        as_float_and_more,
        own_float,
        with_more_of_a_helper,
        alone,
        in_a_tuple,
        by_name,
        after_a_write,
        metrics,
        one_metric,
        last_of_two,
        between_operators,
        in_a_block,
        as_float,
        as_floats,
        as_float_alone,
        float_below_others,
        as_int,
        by_helpers,
        below_a_decorator,
        by_modules,
        before_ways,
        after_a_branch,
        twice,
        returned_twice,
    ],
)
def test_number_that_is_returned_is_read_anew(body: Callable[..., Any]) -> None:
    counters = recordings(compared(program(body)))
    assert counters.replays >= CALLS // 2, str(counters)


def test_number_that_is_returned_below_a_mode_of_torch_functions() -> None:
    """A default device is such a mode."""
    with DEVICE:
        counters = recordings(compared(program(alone)))
    assert counters.replays >= CALLS // 2, str(counters)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "body",
    [
        as_int_of_a_fraction,
        as_a_key,
    ],
)
def test_number_that_python_does_more_with_is_compared(body: Callable[..., Any]) -> None:
    function = compared(program(body))
    assert recordings(function).replays == 0
    says_that_it_gave_up(recordings(function))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "body",
    [
        formatted, negated, looked_for, given_to_a_call, same_name, by_a_helper, by_a_captured_helper, other_ways,
        by_code_in_c_alone, by_code_in_c, chosen, dropped, kept_by_others,
    ],
)  # fmt: skip
def test_number_that_python_only_computes_with_is_computed_anew(body: Callable[..., Any]) -> None:
    counters = recordings(compared(program(body)))
    assert counters.replays >= CALLS // 2, str(counters)


def test_earlier_results_keep_their_numbers() -> None:
    f = capture(by_name)
    found = [f(draw(number)) for number in range(8)]
    assert bits(found) == bits([by_name(draw(number)) for number in range(8)])
    assert len({id(result) for result in found}) == len(found)


def looks_up(x: Tensor, at: Tensor, table: Tensor) -> Any:
    loss = x.sum().item()
    x.zero_()
    try:
        return table[at], loss
    except IndexError:
        return x, loss


@pytest.mark.skipif(DEVICE.type != "cpu", reason="no kernel raises in a call")
def test_a_number_that_was_read_before_an_operator_raised_is_that_of_the_call() -> None:
    captured, table = capture(looks_up), torch.arange(4.0)
    for number in range(8):
        for at in (number % 4, 9 if number > 4 else 0):
            x = torch.ones(3) * (number + at)
            result, expected = (function(x.clone(), torch.tensor([at]), table) for function in (captured, looks_up))
            assert bits(result) == bits(expected)
    assert recordings(captured).replays
