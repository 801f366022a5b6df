"""Containers that were there before the call and that the body hands back are the caller's own, however they are
reached. Empty tuples are all one object."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE

Get = Callable[[], Any]


class Weak(list[int]):
    """A list that a weak reference may refer to."""


def of_a_partial() -> Get:
    keeper: Any = functools.partial(dict, a=1)
    return lambda: keeper.keywords


def of_a_method() -> Get:
    count: Any = [1, 2].count
    return lambda: count.__self__


def by_weak_reference() -> Get:
    kept = Weak([1])
    reference = weakref.ref(kept)
    return lambda: (reference(), kept)[0]


def default_of_a_context_variable() -> Get:
    kept = [1]
    variable = contextvars.ContextVar("variable", default=kept)
    return lambda: variable.get()


def of_an_exception() -> Get:
    error = ValueError([1])
    return lambda: error.args[0]


def of_a_cached_function() -> Get:
    made = functools.lru_cache(lambda: [1])
    made()
    return lambda: made()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [
    of_a_partial, of_a_method, by_weak_reference, default_of_a_context_variable, of_an_exception, of_a_cached_function,
])  # fmt: skip
def test_the_callers_own_container_is_handed_back(make: Callable[[], Get]) -> None:
    get = make()
    captured = capture(lambda x: (get(), x * 2))
    for number in range(7):
        x = torch.full((3,), float(number), device=DEVICE)
        kept, result = captured(x)
        assert kept is get()
        assert torch.equal(result, x * 2)
    assert recordings(captured).replays >= 4


def test_an_empty_tuple_of_state_is_none_of_the_result() -> None:
    twice = functools.partial(lambda x: x * 2)  # its ``args`` is the empty tuple, as parts of what a region hands out
    captured = capture(lambda x: twice(x))
    for number in range(7):
        x = torch.full((3,), float(number), device=DEVICE, requires_grad=True)
        captured(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 3
    assert recordings(captured).replays >= 4


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "make",
    [
        lambda: {1, 2}, lambda: bytearray(b"ab"), lambda: collections.deque([1], maxlen=3),
        lambda: array.array("d", [1.0]), lambda: np.arange(3.0), lambda: torch.arange(3.0, device="cpu").numpy(),
    ],
    ids=["set", "bytearray", "deque", "array of numbers", "NumPy array", "NumPy array on a tensor"],
)  # fmt: skip
def test_what_is_copied_if_it_is_new_is_the_callers_own_if_it_is_not(make: Get) -> None:
    keeper = {"kept": make()}
    captured = capture(lambda x: (keeper["kept"], [keeper["kept"]], make(), x * 2))
    results = []
    for _ in range(5):
        own, (again,), new, _ = captured(torch.ones(2, device=DEVICE))
        assert own is again is keeper["kept"]
        results.append(new)
    assert len(set(map(id, results))) == 5
    assert recordings(captured).replays >= 2
