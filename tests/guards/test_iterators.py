"""Iterators and generators that a body looks at without taking from them: where they stand is what it read."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.device import AGAIN, DEVICE


def _yields() -> Iterator[float]:
    yield 1.0
    yield 2.0


def _left(one: Any) -> float:
    return float(operator.length_hint(one))


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "how much is left of a list": (lambda: iter([1.0, 2.0, 3.0]), _left),
    "how much is left of a range": (lambda: iter(range(5)), lambda one: float(one.__length_hint__())),
    "how much is left of a dict": (lambda: iter({1: 2.0, 3: 4.0}.items()), _left),
    "a copy of it": (lambda: iter([1.0, 2.0, 3.0]), lambda one: sum(copy.copy(one))),
    "what it would be pickled as": (lambda: iter([1.0, 2.0]), lambda one: float(one.__reduce__()[2])),
    "the frame of a generator": (_yields, lambda one: float(one.gi_frame.f_lasti)),
    "the state of a generator": (_yields, lambda one: float(len(inspect.getgeneratorstate(one)))),
}


def _as_it_is(body: Any) -> Any:
    return body


def _looked_at(state: Any, look: Callable[[Any], float], x: Tensor) -> Tensor:
    return x * look(state.values)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_where_it_stands(kind: str) -> None:
    make, look = KINDS[kind]
    told = []
    for keep in (_as_it_is, capture):
        state = types.SimpleNamespace(values=make())
        kept: Any = keep(functools.partial(_looked_at, state, look))
        results = [kept(torch.ones(2, device=DEVICE)) for _ in range(4)]
        next(state.values)
        results += [kept(torch.ones(2, device=DEVICE)) for _ in range(4)]
        state.values = make()
        results += [kept(torch.ones(2, device=DEVICE)) for _ in range(4)]
        told.append([result.clone() for result in results])
    assert all(map(torch.equal, *told))
    assert not torch.equal(told[0][0], told[0][4])
    assert recordings(kept).replays >= 3 * AGAIN


def test_one_that_only_others_take_from_drops_nothing() -> None:
    state = types.SimpleNamespace(batches=iter([1.0] * 20), factor=2.0)
    captured = capture(lambda x: x * state.factor)
    for _ in range(8):
        next(state.batches)
        assert torch.equal(captured(torch.ones(2, device=DEVICE)), torch.full((2,), 2.0, device=DEVICE))
    assert recordings(captured).recordings == 1
