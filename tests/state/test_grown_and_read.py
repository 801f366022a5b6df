"""Lists to which a body appends, in some calls or in all, and whose members it reads: what it reads is guarded."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings

Body = Callable[[Tensor], Any]
APPENDS = False
"""Whether bodies append. It is never set here: that they might is enough."""


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    with config.patch(cache=False), torch.no_grad():
        yield


def _an_item() -> tuple[Body, Callable[[], object]]:
    kept: dict[str, Any] = {"log": [2.0]}

    def body(x: Tensor) -> Any:
        if APPENDS:
            kept["log"].append(1.0)
        return x * kept["log"][0]

    return body, lambda: kept["log"].__setitem__(0, kept["log"][0] + 1)


def _an_item_of_an_item() -> tuple[Body, Callable[[], object]]:
    kept: dict[str, Any] = {"train": {"log": [2.0]}}

    def body(x: Tensor) -> Any:
        if APPENDS:
            kept["train"]["log"].append(1.0)
        return x * kept["train"]["log"][-1]

    return body, lambda: kept["train"]["log"].append(kept["train"]["log"][-1] + 1)


def _what_is_in_a_member() -> tuple[Body, Callable[[], object]]:
    holder = SimpleNamespace(log=[{"v": 2.0}])

    def body(x: Tensor) -> Any:
        if APPENDS:
            holder.log.append({"v": 1.0})
        return x * holder.log[0]["v"]

    return body, lambda: holder.log.__setitem__(0, {"v": holder.log[0]["v"] + 1})


def _what_is_in_a_member_of_an_item() -> tuple[Body, Callable[[], object]]:
    kept: dict[str, Any] = {"log": [[2.0]]}

    def body(x: Tensor) -> Any:
        if APPENDS:
            kept["log"].append([1.0])
        return x * kept["log"][0][0]

    return body, lambda: kept["log"].__setitem__(0, [kept["log"][0][0] + 1])


def _a_deque() -> tuple[Body, Callable[[], object]]:
    kept: dict[str, Any] = {"log": deque([2.0], maxlen=3)}

    def body(x: Tensor) -> Any:
        if APPENDS:
            kept["log"].append(1.0)
        return x * kept["log"][0]

    return body, lambda: kept["log"].__setitem__(0, kept["log"][0] + 1)


def _its_length() -> tuple[Body, Callable[[], object]]:
    kept: dict[str, Any] = {"log": [2.0]}

    def body(x: Tensor) -> Any:
        if APPENDS:
            kept["log"].append(1.0)
        return x * len(kept["log"])

    return body, lambda: kept["log"].append(3.0)


KINDS = [_an_item, _an_item_of_an_item, _what_is_in_a_member, _what_is_in_a_member_of_an_item, _a_deque, _its_length]


@pytest.mark.parametrize("make", KINDS)
def test_members_that_are_read(make: Callable[[], tuple[Body, Callable[[], object]]]) -> None:
    body, change = make()
    function, x = capture(body), torch.ones(2)
    for number in range(12):
        if number in (4, 8):
            change()
        assert torch.equal(function(x), body(x))
    assert recordings(function).replays >= 6


@pytest.mark.parametrize("make", KINDS)
def test_in_calls_that_append(make: Callable[[], tuple[Body, Callable[[], object]]]) -> None:
    bodies = [make(), make()]
    functions, x = [bodies[0][0], capture(bodies[1][0])], torch.ones(2)
    globals_of = bodies[0][0].__globals__
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # what is read is another thing in each call
        patch.setitem(globals_of, "APPENDS", True)
        for number in range(10):
            if number in (4, 7):
                for _, change in bodies:
                    change()
            assert torch.equal(functions[0](x), functions[1](x))


@pytest.mark.parametrize("begin", [[], [2], [2, 2, 2]], ids=["empty", "begun", "full of the same"])
def test_a_deque_that_drops_what_is_old(begin: list[int]) -> None:
    """What is appended is a plain number, which one that is full may drop as well: it looks as it did."""
    recent = [deque[int](begin, maxlen=3) for _ in range(2)]

    def append_to(queue: deque[int]) -> Body:
        def body(x: Tensor) -> Tensor:
            queue.append(2)
            return x * 2

        return body

    eager, captured = append_to(recent[0]), capture(append_to(recent[1]))
    for call in range(24):
        for queue in recent if call % 8 == 7 else ():
            queue.append(9)
        eager(torch.ones(3))
        captured(torch.ones(3))
        assert recent[1] == recent[0], call
    assert recordings(captured).replays >= 12
