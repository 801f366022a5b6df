"""Functions that only compute are told from those that may do more by their code and by what it names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from math import cos
from typing import Any

import pytest

from capture.key.computing import holders_read

LENGTH, BOUNDS, COUNTS = 20, (3, 7), [1]
total = 0


def ramp(epoch: int) -> float:
    return min(1.0, (epoch + 1) / LENGTH)


def by_another(epoch: int, power: float = 2.0) -> float:
    return ramp(epoch) ** power if epoch < BOUNDS[1] else 0.5 * (1 + cos(math.pi * epoch / LENGTH))


def with_a_cell(length: Any) -> Callable[[int], Any]:
    return lambda epoch: epoch / length


def by_a_list(epoch: int) -> float:
    return 1 / (epoch + COUNTS[0])


def counting(epoch: int) -> float:
    global total
    total += epoch
    return 0.5


def printing(epoch: int) -> float:
    print(epoch)
    return 0.5


def importing(epoch: int) -> float:
    import random

    return random.random() * epoch


def in_a_comprehension(epoch: int) -> float:
    return sum(bound / epoch for bound in BOUNDS)


def with_a_default(epoch: int, seen: list[int] = []) -> float:  # noqa: B006
    seen[0] = epoch
    return 0.5


def with_an_attribute(epoch: int) -> float:
    return with_an_attribute.e * epoch  # type: ignore[attr-defined, no-any-return]


with_an_attribute.e = 1.0  # type: ignore[attr-defined]


def counted_cell() -> Callable[[int], int]:
    count = 0

    def counting_on(epoch: int) -> int:
        nonlocal count
        count += 1
        return count * epoch

    return counting_on


class Called:
    def __call__(self, epoch: int) -> float:
        return epoch / 2


@pytest.mark.parametrize(
    "function",
    [ramp, by_another, with_a_cell(3), with_a_cell(ramp), functools.partial(pow, 0.9), math.sqrt, abs, float],
)
def test_computes(function: Any) -> None:
    assert holders_read(function) is not None


@pytest.mark.parametrize(
    "function",
    [
        by_a_list, counting, printing, importing, in_a_comprehension, with_a_default, with_an_attribute, counted_cell(),
        with_a_cell([1]), with_a_cell(by_a_list), functools.partial(pow, COUNTS), functools.partial(printing, 1),
        Called(), Called().__call__, print, open,
    ],
)  # fmt: skip
def test_may_do_more(function: Any) -> None:
    assert holders_read(function) is None


def test_what_is_read() -> None:
    function = with_a_cell(3)
    read = holders_read(function)
    assert read is not None
    assert any(one is globals() for one in read)
    assert any(one is function.__closure__[0] for one in read)  # type: ignore[index]
