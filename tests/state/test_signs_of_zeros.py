"""A body that leaves -0.0 where 0.0 was leaves another value there, in whatever it is kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture
from capture.tree import thread_trees
from tests.support.device import use_device

Place = tuple[Callable[[Any], None], Callable[[], Any]]
"""A function that sets it, and one that gives what is there."""
CALLS = 40
_in_scope: Any = 0.0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    use_device()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these never replay
        yield


def a_global() -> Place:
    def put(value: Any) -> None:
        global _in_scope
        _in_scope = value

    return put, lambda: _in_scope


def a_cell() -> Place:
    held: Any = 0.0

    def put(value: Any) -> None:
        nonlocal held
        held = value

    return put, lambda: held


def an_attribute() -> Place:
    holder = SimpleNamespace(last=0.0)

    def put(value: Any) -> None:
        holder.last = value

    return put, lambda: holder.last


def an_attribute_of_a_class() -> Place:
    class Holder:
        last: Any = 0.0

    def put(value: Any) -> None:
        Holder.last = value

    return put, lambda: Holder.last


def an_item() -> Place:
    log: dict[str, Any] = {}

    def put(value: Any) -> None:
        log["last"] = value

    return put, lambda: log


def an_item_of_a_list() -> Place:
    values = [1.0, 0.0]

    def put(value: Any) -> None:
        values[1] = value

    return put, lambda: values


def members_of_a_list() -> Place:
    values = [0.0]

    def put(value: Any) -> None:
        values[:] = [value, value]

    return put, lambda: values


def a_tuple() -> Place:
    log: dict[str, Any] = {}

    def put(value: Any) -> None:
        log["last"] = (value, 1)

    return put, lambda: log


def a_list_made_again() -> Place:
    """Somebody has the former ones still."""
    log: dict[str, Any] = {"last": [0.0, 1]}
    former: list[Any] = []

    def put(value: Any) -> None:
        log["last"] = [value, 1]

    def get() -> Any:
        former.append(log["last"])
        return former

    return put, get


def a_tuple_in_a_list() -> Place:
    values: list[Any] = [((0.0, 1), 2)]

    def put(value: Any) -> None:
        values[0] = ((value, 1), 2)

    return put, lambda: values


def a_complex_number() -> Place:
    log: dict[str, Any] = {}

    def put(value: Any) -> None:
        log["last"] = complex(1.0, value)

    return put, lambda: log


PLACES = [
    a_global, a_cell, an_attribute, an_attribute_of_a_class, an_item, an_item_of_a_list, members_of_a_list, a_tuple,
    a_list_made_again, a_tuple_in_a_list, a_complex_number,
]  # fmt: skip


def left(make: Callable[[], Place], *, reads: bool, captured: bool) -> list[str]:
    """What is there after each call. ``reads``: the zero comes from a tensor."""
    put, get = make()

    def body(x: Tensor, is_negative: bool) -> Tensor:
        put((x.sum() * 0.0).item() if reads else -0.0 if is_negative else 0.0)
        return x * 2

    function = capture(body) if captured else body
    seen = []
    for number in range(CALLS):
        sign = -1.0 if number * number % 5 > 1 else 1.0
        function(torch.full((3,), sign), not reads and sign < 0)
        seen.append(repr(get()))
    return seen


@pytest.mark.one_in(4)
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("make", PLACES)
def test_zero_has_its_sign(make: Callable[[], Place], reads: bool) -> None:
    assert left(make, reads=reads, captured=True) == left(make, reads=reads, captured=False)
