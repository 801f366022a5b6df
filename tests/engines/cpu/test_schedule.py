"""Which operators of a tape need the results of which others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture import capture
from capture.api.decorator import captured_state
from capture.core.schedule import Schedule

kept = torch.zeros(3, device="cpu")


def chain(x: Tensor) -> Tensor:
    return torch.relu(x * 2) + 1


def two_branches(x: Tensor) -> Tensor:
    return torch.relu(x) + torch.tanh(x)


def writes_after_reads(x: Tensor) -> Tensor:
    y = x * 2
    z = torch.relu(y)
    y.add_(1)  # after the one that reads it
    return z + y


def views(x: Tensor) -> Tensor:
    y = x * 2
    y[0].zero_()
    return y[1:] + 1  # reads what was written through another view


def draws(x: Tensor) -> Tensor:
    return torch.rand_like(x) + torch.rand_like(x)


def state(x: Tensor) -> Tensor:
    kept.add_(1)
    return x + kept


def empty(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("body", "widths", "longest"),
    [
        (chain, (1, 1, 1), ("mul", "relu", "add")),
        (two_branches, (2, 1), ("relu", "add")),
        (writes_after_reads, (1, 1, 1, 1), ("mul", "relu", "add_", "add")),
        (views, (1, 1, 1), ("mul", "zero_", "add")),
        (draws, (1, 1, 1), ("rand_like", "rand_like", "add")),
        (state, (1, 1), ("add_", "add")),
        (empty, (), ()),
    ],
)
def test_levels(body: Callable[[Tensor], Tensor], widths: tuple[int, ...], longest: tuple[str, ...]) -> None:
    captured = capture(body)
    for _ in range(3):
        captured(torch.ones(3, device="cpu"))
    (entry,) = captured_state(captured).entries()
    (node,) = entry.nodes
    assert node.recording is not None
    schedule = node.recording.schedule()
    assert isinstance(schedule, Schedule)
    assert schedule.widths == widths
    assert tuple(name.removeprefix("aten.").partition(".")[0] for name in schedule.longest) == longest
