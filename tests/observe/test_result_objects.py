"""Objects in results that each run makes anew: what the caller does with one is not seen by later calls."""

from __future__ import annotations

import asyncio
import collections
import datetime
import enum
import io
import itertools
import random
import re
import threading
import types
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, recordings
from capture.observe import result_objects
from tests.support.decorated import fresh as fresh
from tests.support.device import AGAIN

X = torch.arange(4.0)


async def awaited(x: Tensor) -> Tensor:
    return x * 3


def taken(values: Any) -> list[Any]:
    """All that is left of an iterator."""
    return [one.tolist() if isinstance(one, Tensor) else one for one in values]


def put(one: Any, name: str, value: Any) -> Any:
    """Set an attribute, as the caller of a function may do with what it got."""
    setattr(one, name, value)
    return one


Use = Callable[[Any], Any]
MADE: dict[str, tuple[Callable[[Tensor], Any], Use]] = {
    "generator": (lambda x: (number for number in range(3)), taken),
    "generator of tensors": (lambda x: (x * number for number in range(3)), taken),
    "iterator": (lambda x: iter([x, x + 1]), taken),
    "map": (lambda x: map(torch.neg, [x, x + 1]), taken),
    "itertools": (lambda x: itertools.count(3), lambda one: [next(one), next(one)]),
    "coroutine": (awaited, lambda one: asyncio.run(one).tolist()),
    "Counter": (lambda x: collections.Counter("aab"), lambda one: (one["a"], one.update("a"))),
    "namespace": (lambda x: types.SimpleNamespace(a=1), lambda one: (one.a, put(one, "a", 9).a)),
    "exception": (lambda x: ValueError(3), lambda one: (one.args, put(one, "args", (9,)).args)),
    "class": (lambda x: type("Kind", (), {"a": 1}), lambda one: (one.a, put(one, "a", 2).a)),
    "module": (lambda x: types.ModuleType("made"), lambda one: (hasattr(one, "a"), put(one, "a", 2).a)),
    "lock": (lambda x: threading.Lock(), lambda one: (one.acquire(blocking=False), one.acquire(blocking=False))),
    "file": (lambda x: io.StringIO("abc"), lambda one: (one.read(), one.write("x"))),
    "generator of random numbers": (lambda x: random.Random(3), lambda one: one.random()),
    "function": (lambda x: lambda: x * 2, lambda one: (one().tolist(), vars(one).copy(), put(one, "n", 1).n)),
    "set": (lambda x: {1, 2}, lambda one: (one.pop(), len(one))),
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("place", ["alone", "beside a tensor"])
@pytest.mark.parametrize("name", MADE)
def test_each_call_has_its_own(name: str, place: str) -> None:
    body, use = MADE[name]
    if place == "beside a tensor":
        f = capture(lambda x: (x + 1, body(x)))
    else:
        f = capture(lambda x: (None, body(x)))
    for number in range(6):
        x = X + number
        assert use(f(x)[1]) == use(body(x)), number


class Colour(enum.Enum):
    RED = 1


SENTINEL, CONFIG = threading.Event(), types.SimpleNamespace(a=1)
LASTING: dict[str, Callable[[], Any]] = {
    "date": lambda: datetime.date(2026, 1, 2),
    "Decimal": lambda: Decimal("1.5"),
    "Path": lambda: Path("a", "b"),
    "enumeration": lambda: Colour.RED,
    "dtype": lambda: torch.float32,
    "dtype of NumPy": lambda: np.dtype("int8"),
    "number of NumPy": lambda: np.float32(2),
    "pattern": lambda: re.compile("a"),
    "function": lambda: torch.relu,
    "class": lambda: Colour,
    "module": lambda: re,
    "object of a global": lambda: SENTINEL,
    "namespace of a global": lambda: CONFIG,
    "frozen set": lambda: frozenset({1, 2}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_and_what_cannot_change_is_replayed(name: str) -> None:
    made = LASTING[name]
    f = capture(lambda x: (x + 1, made()))
    for _ in range(4 + AGAIN):
        y, value = f(X)
        assert y.tolist() == (X + 1).tolist()
        assert value == made()
    assert recordings(f).replays == 2


def test_no_run_that_makes_a_coroutine_is_thrown_away() -> None:
    """Such a run would leave a coroutine that nobody awaits."""
    f = capture(lambda x: (x + 1, awaited(x)))
    with pytest.warns(CaptureWarning, match="CG205"):
        coroutines = [f(X)[1] for _ in range(4)]
    assert [asyncio.run(coroutine).tolist() for coroutine in coroutines] == [(X * 3).tolist()] * 4
    counts = recordings(f)
    assert counts.body_runs == counts.watched_calls + counts.eager_calls == 4


def test_numbers_go_with_their_objects() -> None:
    event = threading.Event()
    text = result_objects.identity_text(event)
    assert result_objects.identity_text(event) == text
    assert result_objects.identity_text(threading.Event()) != text
    assert result_objects.identity_text(iter([])) != result_objects.identity_text(iter([]))
    for _ in range(3 * result_objects._MOST):
        result_objects.identity_text(threading.Event())
    assert len(result_objects._known) <= result_objects._MOST + 2
    assert result_objects.identity_text(event) == text
