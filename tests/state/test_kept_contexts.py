"""A ``contextvars.Context`` that code keeps, and in which a body sets variables."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE

Body = Callable[[torch.Tensor], torch.Tensor]


class World:
    """A context with two variables."""

    def __init__(self) -> None:
        self.scale: contextvars.ContextVar[Any] = contextvars.ContextVar("scale", default=2.0)
        self.log: contextvars.ContextVar[list[int]] = contextvars.ContextVar("log")
        self.context = contextvars.Context()
        self.context.run(self.log.set, [])

    def seen(self) -> tuple[Any, int, int]:
        scale = self.context.get(self.scale)
        return getattr(scale, "tolist", lambda: scale)(), len(self.context[self.log]), len(self.context)


def number(world: World) -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        world.context.run(world.scale.set, 5.0)
        factor: float = world.context.run(world.scale.get)
        return x * factor

    return body


def within_a_function(world: World) -> Body:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        world.scale.set(4.0)
        factor: float = world.scale.get()
        return x * factor

    return lambda x: world.context.run(scaled, x)


def tensor(world: World) -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        world.context.run(world.scale.set, y)
        return y + 1

    return body


def counter(world: World) -> Body:
    def count() -> None:
        world.scale.set(world.scale.get() + 1)

    def body(x: torch.Tensor) -> torch.Tensor:
        world.context.run(count)
        return x * 2

    return body


def list_that_grows(world: World) -> Body:
    def body(x: torch.Tensor) -> torch.Tensor:
        world.context.run(world.log.get).append(1)
        return x * 2

    return body


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("make", [number, within_a_function, tensor, counter, list_that_grows])
def test_what_a_body_sets_there(make: Callable[[World], Body]) -> None:
    worlds = World(), World()
    eager, captured = make(worlds[0]), capture(make(worlds[1]))
    with torch.no_grad():
        for step in range(12):
            x = torch.full((3,), float(step), device=DEVICE)
            assert torch.equal(captured(x), eager(x))
            assert worlds[1].seen() == worlds[0].seen()
            for world in worlds if step == 8 else ():
                world.context.run(world.scale.set, 11.0)
    assert make in (counter, list_that_grows) or recordings(captured).replays >= 6
