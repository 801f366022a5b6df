"""A body that takes from a generator or an iterator of the host runs eagerly, and the user hears on which line."""

from __future__ import annotations

import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, recordings


def _module_random() -> Any:
    return lambda x: x if random.random() < 0.5 else x * 2


def _shuffled() -> Any:
    def body(x: Tensor) -> Tensor:
        order = [0, 1, 2]
        random.shuffle(order)
        return x[order] * 1

    return body


def _numpy_global() -> Any:
    return lambda x: x * float(np.random.rand())


def _own_random() -> Any:
    mine = random.Random(3)
    return lambda x: x * mine.random()


def _own_numpy() -> Any:
    mine = np.random.default_rng(3)
    return lambda x: x * float(mine.random())


def _own_state() -> Any:
    mine = np.random.RandomState(3)
    return lambda x: x * float(mine.rand())


def _on_module() -> Any:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.draws = random.Random(3)

        @override
        def forward(self, x: Tensor) -> Tensor:
            return x if self.draws.random() < 0.5 else x * 2

    return Drops()


def _system() -> Any:
    mine = random.SystemRandom()
    return lambda x: x * (1 if mine.random() < 2 else 2)


def _count() -> Any:
    steps = itertools.count()
    return lambda x: x * next(steps)


def _chain() -> Any:
    steps = itertools.chain([0.1] * 3, itertools.repeat(1.0))
    return lambda x: x * next(steps)


def _cycle() -> Any:
    steps = itertools.cycle([1.0, 2.0, 3.0])
    return lambda x: x * next(steps)


def _list_iterator() -> Any:
    steps = iter([1.0, 1.0, 1.0] + [2.0] * 20)
    return lambda x: x * next(steps)


def _generator() -> Any:
    def schedule() -> Any:
        for step in range(100):
            yield 1.0 + step // 3

    steps = schedule()
    return lambda x: x * next(steps)


def _zip() -> Any:
    steps = zip([1.0] * 3 + [2.0] * 20, itertools.repeat(1.0))
    return lambda x: x * next(steps)[0]


def _for_loop() -> Any:
    steps = iter(range(100))

    def body(x: Tensor) -> Tensor:
        for step in steps:
            return x * step
        return x

    return body


_TAKES = [
    _module_random, _shuffled, _numpy_global, _own_random, _own_numpy, _own_state, _on_module, _system, _count, _chain,
    _cycle, _list_iterator, _generator, _zip, _for_loop,
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", _TAKES)
def test_what_is_taken_from_the_host_is_taken_in_every_call(make: Callable[[], Any]) -> None:
    expected = _drawn(make())
    captured = capture(make())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        drawn = _drawn(captured)
    assert all(map(torch.equal, drawn[0], expected[0]))
    assert drawn[1:] == expected[1:]
    assert any(isinstance(warning.message, CaptureWarning) for warning in said)


def _drawn(function: Any) -> tuple[list[Tensor], float, float]:
    random.seed(0)
    np.random.seed(0)
    return [function(torch.ones(3)) for _ in range(10)], random.random(), float(np.random.rand())


def test_the_line_is_told() -> None:
    captured = capture(_shuffled())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            captured(torch.ones(3))
    assert "random.shuffle(order)" in str(said[0].message)


def test_generators_that_nobody_draws_from_are_no_obstacle() -> None:
    mine, steps, left = random.Random(3), itertools.count(), itertools.cycle([1])

    def body(x: Tensor) -> Tensor:
        return x * 2 + (mine is None) + (steps is None)

    captured = capture(body)
    for number in range(5):
        x = torch.full((2,), float(number))
        assert torch.equal(captured(x), body(x))
    assert recordings(captured).replays >= 2
    del left


def test_numpy_in_the_middle_of_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread imports it for the first time."""
    half = types.ModuleType("numpy.random")
    half.Generator = np.random.Generator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numpy.random", half)
    f, x = capture(lambda x: x * 2 + 1, name="f"), torch.ones(3)
    for _ in range(4):
        assert torch.equal(f(x), x * 2 + 1)
    assert recordings(f).replays
