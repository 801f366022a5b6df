"""Two arguments, or parts of them, that are the very same list or dict: what the body changes in the one shows in the
other, and it may ask by ``is``."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with torch.no_grad(), config.patch(cache=False):
        yield


def grow(x: Tensor, one: Any, other: Any) -> Any:
    """Changes one and reads the other."""
    if isinstance(one, list):
        one.append(x * 2)
    else:
        one["new"] = x * 2
    values = list(other) if isinstance(other, list) else list(other.values())
    return torch.stack(values).sum(0), one is other


def nested(x: Tensor, whole: Any) -> Any:
    return grow(x, whole["a"], whole["b"][0])


MAKE: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(2, device=DEVICE)],
    "dict": lambda: {"a": torch.ones(2, device=DEVICE)},
    "ordered dict": lambda: OrderedDict(a=torch.ones(2, device=DEVICE)),
    "defaultdict": lambda: defaultdict(int, a=torch.ones(2, device=DEVICE)),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("body", [grow, nested])
def test_the_same_one_twice(kind: str, body: Callable[..., Any]) -> None:
    captured: Any = capture(body)
    for number in range(12):
        told = []
        for run in (body, captured):
            one = MAKE[kind]()
            other = one if number % 2 else MAKE[kind]()
            arguments = (one, other) if body is grow else ({"a": one, "b": (other,)},)
            total, is_one = run(torch.full((2,), float(number), device=DEVICE), *arguments)
            values = one if isinstance(one, list) else one.values()
            told.append((total, is_one, [value.clone() for value in values], len(other)))
        (total, is_one, values, length), (our_total, was_one, our_values, our_length) = told
        assert torch.equal(total, our_total)
        assert (is_one, length) == (was_one, our_length)
        assert all(map(torch.equal, values, our_values))
    assert recordings(captured).replays >= 4


def test_many_containers_go_the_general_way() -> None:
    captured = capture(lambda rows: torch.stack([row[0] for row in rows]).sum())
    for number in range(5):
        rows = [[torch.full((1,), float(number + at), device=DEVICE)] for at in range(100)]
        assert captured(rows) == sum(number + at for at in range(100))
    assert recordings(captured).replays >= 2
