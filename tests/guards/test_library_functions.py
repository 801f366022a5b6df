"""A library's function that is itself captured: what it reads is guarded as it is where a user's body calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings


class Scale:
    value = 2.0


def dispatched() -> Any:
    @functools.singledispatch
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    return scaled, lambda: scaled.register(Tensor, lambda x: x * 9)


def read_by_an_implementation() -> Any:
    Scale.value = 2.0

    @functools.singledispatch
    def scaled(x: Tensor) -> Tensor:
        return x

    scaled.register(Tensor, lambda x: x * Scale.value)
    return scaled, lambda: setattr(Scale, "value", 5.0)


def method() -> Any:
    Scale.value = 2.0

    class Holder:
        @functools.singledispatchmethod
        def scaled(self, x: Tensor) -> Tensor:
            return x * Scale.value

    holder: Any = Holder()
    return holder.scaled, lambda: Holder.scaled.register(Tensor, lambda self, x: x * 7)  # type: ignore[attr-defined]


def forward() -> Any:
    net = nn.Sequential(nn.Linear(3, 3))
    return net.forward, lambda: net[0].register_forward_hook(lambda *parts: parts[-1] * 2)


def whole_call() -> Any:
    net = nn.Sequential(nn.Linear(3, 3))
    return net.__call__, lambda: net.register_forward_hook(lambda *parts: parts[-1] * 2)


def run(program: Callable[[], Any], *, captured: bool) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    function, change = program()
    called: Any = capture(function) if captured else function
    results = []
    for number in range(10):
        if number == 5:
            change()
        results.append(called(torch.full((2, 3), float(number))).tolist())
    return results, called


@pytest.mark.one_in(4)
@pytest.mark.parametrize("program", [dispatched, read_by_an_implementation, method, forward, whole_call])
def test_a_change_of_what_it_reads_shows(program: Callable[[], Any]) -> None:
    with torch.no_grad(), config.patch(cache=False):
        found, called = run(program, captured=True)
        assert found == run(program, captured=False)[0]
        assert recordings(called).replays >= 3
