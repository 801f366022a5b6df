"""Numbers that one branch of a body counts up and another sets anew, and on which nothing else depends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.segments.test_bodies import fresh
from tests.support.device import DEVICE, EXECUTES
from tests.support.observed import bits

__all__ = ["fresh"]
Body = Callable[[Any, Tensor], Any]
CALLS = 60


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with config.patch(drop_slow=False):
        yield


def of_an_attribute(s: Any, x: Tensor) -> Tensor:
    if x.max() > 0.5:
        s.n += 1
    else:
        s.n = 0
    return x * 2


def by_a_value(s: Any, x: Tensor) -> Tensor:
    if x.max().item() > 0.5:
        s.n += 1
    else:
        s.n = 0
    return x * 2


def of_an_item(s: Any, x: Tensor) -> Tensor:
    if x.max() > 0.5:
        s.counts["n"] += 1
    else:
        s.counts["n"] = 0
    return x * 2


def by_its_text(s: Any, x: Tensor) -> Tensor:
    if x.max() > 0.5:
        s.n += 1
    else:
        setattr(s, "n", 0)  # noqa: B010
    return x * 2


def of_an_item_of_a_list(s: Any, x: Tensor) -> Tensor:
    if x.max() > 0.5:
        s.list[0] += 1
    else:
        s.list[0] = 0
    return x * 2


def deleted(s: Any, x: Tensor) -> Tensor:
    if x.max() > 0.5:
        s.n += 1
    else:
        del s.n
        s.n = 0
    return x * 2


def state() -> SimpleNamespace:
    return SimpleNamespace(n=0, counts={"n": 0}, list=[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", [of_an_attribute, by_a_value, of_an_item, by_its_text, of_an_item_of_a_list, deleted])
def test_a_count_that_another_branch_sets_anew(body: Body) -> None:
    ours, eager = state(), state()
    captured = capture(lambda x: body(ours, x))
    for number in range(CALLS):
        is_reset = number % 4 == 3 if number < CALLS // 2 else number % 6 == 5  # as high in each of several rows
        x = torch.full((3,), 0.3 if is_reset else 1.0, device=DEVICE)
        assert bits(captured(x)) == bits(body(eager, x)), number
        assert vars(ours) == vars(eager), number
    if EXECUTES and body is not of_an_item_of_a_list:
        assert recordings(captured).replays > CALLS // 2
