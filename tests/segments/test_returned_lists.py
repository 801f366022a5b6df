"""A list that the body makes of a tensor and only returns is read anew in each replay; any other is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.segments.bodies import Program, draw
from tests.segments.test_bodies import CALLS, compared, fresh
from tests.support.device import DEVICE
from tests.support.observed import bits

__all__ = ["fresh"]


def deep(x: Tensor) -> Tensor:
    return torch.tanh(torch.relu(x) * 1.25 + 0.1)


def alone(x: Tensor) -> Any:
    return deep(x).tolist()


def actions(x: Tensor) -> Any:
    with torch.no_grad():
        return deep(x).argmax(-1).cpu().tolist()


def flags(x: Tensor) -> Any:
    y = deep(x)
    return {"done": (y.sum(-1) > 2).tolist(), "y": y}


def with_numbers(x: Tensor) -> Any:
    y = deep(x)
    return [y.sum().item(), y.sum(-1).tolist(), (y.mean(0).tolist(), y.max().item())]


def written_later(x: Tensor) -> Any:
    y = deep(x)
    row = y[0].tolist()
    y.add_(1)
    return row, y


def of_the_argument(x: Tensor) -> Any:
    x.mul_(2)
    row = x[1].tolist()
    x.add_(1)
    return row


def to_list(tensor: Tensor) -> Any:
    return tensor.detach().cpu().tolist()


def by_a_helper(x: Tensor) -> Any:
    y = deep(x)
    return to_list(y[0]), to_list(y[1])


def twice(x: Tensor) -> Any:
    row = deep(x)[0].tolist()
    return row, {"again": row}


def unusual(x: Tensor) -> Any:
    y = deep(x)[0]
    return torch.stack([y[0] / 0, y[1] * float("nan"), -0.0 * y[2], -y[3] / 0]).tolist()


def after_a_decision(x: Tensor) -> Any:
    y = deep(x) if x[0, 0] > 0 else deep(x) * 2
    return y.sum(-1).tolist()


REPLAYED: list[Callable[[Tensor], Any]] = [
    alone, actions, flags, with_numbers, written_later, of_the_argument, by_a_helper, twice, unusual, after_a_decision,
]  # fmt: skip


def changed(x: Tensor) -> Any:
    row = deep(x)[0].tolist()
    row.append(3)
    return row


def first(x: Tensor) -> Any:
    return deep(x)[0].tolist()[0]


def decides(x: Tensor) -> Any:
    row = deep(x)[0].tolist()
    return row if max(row) > 0.9 else x


def doubled(x: Tensor) -> Any:
    return deep(x)[0].tolist() * 2


def unpacked(x: Tensor) -> Any:
    a, *rest = deep(x)[0].tolist()
    return rest, a


OTHERS: list[Callable[[Tensor], Any]] = [changed, first, decides, doubled, unpacked]


def program(body: Callable[[Tensor], Any]) -> Callable[[], Program]:
    return lambda: (body, lambda number: (draw(number),), None)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", REPLAYED)
def test_lists_are_as_eager_and_replay(body: Callable[[Tensor], Any]) -> None:
    counters = recordings(compared(program(body)))
    if DEVICE.type == "cpu":
        assert counters.replays >= CALLS - 8, str(counters)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", REPLAYED)
def test_lists_are_verified(body: Callable[[Tensor], Any]) -> None:
    with config.patch(verify="always", poison=True):
        compared(program(body))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("body", OTHERS)
def test_what_follows_from_a_list_is_as_eager(body: Callable[[Tensor], Any]) -> None:
    compared(program(body))


def test_lists_are_kept_as_they_are() -> None:
    """Each call has a list of its own, which the caller may change."""
    f, kept = capture(alone), []
    for number in range(8):
        row = f(draw(number))
        row[0] = number
        kept.append(row)
    for number, row in enumerate(kept):
        assert bits(row) == bits([number, *alone(draw(number))[1:]])


def test_list_before_an_operator_that_raises() -> None:
    log = list[Any]()

    def body(x: Tensor, at: Tensor) -> Any:
        y = deep(x)
        row = y[0].tolist()
        y.add_(1)
        try:
            return row, y[at]
        except IndexError:
            log.append("raised")
            return row, y

    at = [torch.tensor([one]).to(DEVICE) for one in (0, 1, 9 if DEVICE.type == "cpu" else 2)]
    f = capture(body)
    for number in range(24):
        args = at[2 if number % 7 == 6 else number % 2]
        expected, found = body(draw(number), args), f(draw(number), args)
        assert bits(expected) == bits(found), number
    assert len(log) in (0, 6)


@pytest.mark.parametrize("rows", [True, False])
def test_list_of_memory_that_is_written_before_an_operator_raises(rows: bool) -> None:
    """The body that goes on gets the list as it was read, and nothing is written twice."""

    def body(x: Tensor, at: Tensor) -> Any:
        y = deep(x)
        read = y.tolist() if rows else y[1].tolist()
        y.add_(1)
        try:
            return read, y[at]
        except IndexError:
            return read, y

    at = [torch.tensor([one]).to(DEVICE) for one in (0, 1, 9 if DEVICE.type == "cpu" else 2)]
    f = capture(body)
    for number in range(24):
        args = at[2 if number % 7 == 6 else number % 2]
        assert bits(body(draw(number), args)) == bits(f(draw(number), args)), number


def test_list_beside_another_number_in_each_call() -> None:
    def body(x: Tensor, scale: float) -> Any:
        return (deep(x) * scale).sum(-1).tolist()

    f = capture(body)
    for number in range(24):
        args = draw(number), 0.1 / (number + 1.5)
        assert bits(body(*args)) == bits(f(*args))
    if DEVICE.type == "cpu":
        assert recordings(f).replays >= 16
