"""A sum of floats that are read is computed anew in each replay, as this Python computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from torch import Tensor

from capture import recordings
from tests.segments.bodies import Program, draw
from tests.segments.test_bodies import compared, fresh
from tests.support.device import EXECUTES

__all__ = ["fresh"]
_total = sum
SUMS: dict[str, tuple[Callable[[Iterator[float]], float], bool]] = {
    "a list": (lambda reads: sum([*reads]), True),
    "a generator": (lambda reads: sum(one + 0.1 for one in reads), True),
    "a start": (lambda reads: sum([*reads], 0.1), True),
    "whole numbers between": (lambda reads: sum([1, *reads, 3], start=2), True),
    "through map": (lambda reads: sum(map(sum, [[*reads], [0.1, 0.2, 0.3]])), True),
    "by another name": (_total, False),
    "added one by one": (lambda reads: next(reads) + next(reads) + next(reads) + next(reads), True),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_floats_is_what_python_makes_of_it(name: str) -> None:
    """From Python 3.12 on ``sum`` does not add plainly, which shows with some numbers only: not with the first ones."""
    add, follows = SUMS[name]

    def made() -> Program:
        meter = SimpleNamespace(total=0.0)

        def body(x: Tensor) -> Tensor:
            meter.total = add(x[at].item() for at in range(4))
            return x * 2

        def arguments(number: int) -> tuple[Tensor]:
            x = draw(number, 4).double() / 3
            return (x.mul(8).round() / 8 if number < 5 else x,)

        return body, arguments, meter

    function = compared(made, calls=14)
    assert recordings(function).replays >= (9 if follows and EXECUTES else 0)
