"""What one run read of Python state is taken for the run of another key, as long as nothing of it is another."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from capture import capture, recordings
from capture.guards import read_guards
from capture.testing import assert_equal_to_eager
from tests.support.device import DEVICE


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor, self.parts, self.named = factor, [factor], {"more": factor}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + sum(self.parts) + self.named["more"]


def offset(value: float = 1.0) -> float:
    return value


def other_offset(value: float = 7.0) -> float:
    return value


class World:
    """What a body reads: an object, a module, a class, a function and a module of Python's."""

    def __init__(self) -> None:
        self.scale, self.settings = Scale(2.0), types.ModuleType("settings_of_a_test")
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(DEVICE)
        self.kind: Any = type("Kind", (), {"shift": 3.0})
        self.offset, self.held = offset, [self.layers[0].weight]
        self.settings.__dict__["on"] = True

    def body(self, x: torch.Tensor) -> Any:
        y = self.layers(x) if self.settings.on else x
        is_held = any(one is self.layers[0].weight for one in self.held)
        return self.scale(y) + self.kind.shift + self.offset() + (0.5 if is_held else 0.0)


def _replace_layer(world: World) -> None:
    world.layers[1] = nn.Tanh()


def _replace_weight(world: World) -> None:
    with torch.no_grad():
        linear: Any = world.layers[0]
        linear.weight = nn.Parameter(linear.weight * 2)


def _replace_defaults(world: World) -> None:
    changed = types.FunctionType(offset.__code__, offset.__globals__, "offset", (5.0,))
    world.offset = changed


CHANGES: dict[str, Callable[[World], object]] = {
    "an attribute": lambda world: setattr(world.scale, "factor", 4.0),
    "an object": lambda world: setattr(world, "scale", Scale(5.0)),
    "a member of a list": lambda world: world.scale.parts.append(3.0),
    "a member of a dict": lambda world: world.scale.named.update(more=6.0),
    "an attribute of a class": lambda world: setattr(world.kind, "shift", 9.0),
    "a class": lambda world: setattr(world, "kind", type("Kind", (), {"shift": 8.0})),
    "a method of a class": lambda world: setattr(world.scale, "__class__", type("Other", (Scale,), {"factor": 1.5})),
    "a function": lambda world: setattr(world, "offset", other_offset),
    "the defaults of a function": _replace_defaults,
    "a name in a module": lambda world: setattr(world.settings, "on", False),
    "a layer": _replace_layer,
    "a weight": _replace_weight,
    "a parameter in a list": lambda world: world.held.__setitem__(0, nn.Parameter(torch.ones(4, 4, device=DEVICE))),
    "a hook": lambda world: world.layers.register_forward_hook(lambda *parts: parts[2] + 1),
}


def _count_walks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    walks, walk = list[None](), read_guards._read_by

    def counted(*args: Any) -> Any:
        walks.append(None)
        return walk(*args)

    monkeypatch.setattr(read_guards, "_read_by", counted)
    return walks


def _given(rows: int) -> torch.Tensor:
    return torch.arange(4.0 * rows, device=DEVICE).reshape(rows, 4) / 8


def test_one_look_at_state_serves_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, world = _count_walks(monkeypatch), World()
    body = capture(world.body)
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 5):
            for _ in range(3):
                assert torch.equal(body(_given(rows)), world.body(_given(rows)))
    assert recordings(body).recordings == 5
    assert len(walks) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_changed_is_looked_at_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run of another key, and once more when all are recorded."""
    walks, world = _count_walks(monkeypatch), World()
    body = capture(world.body, max_recordings=32)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(body(_given(1)), world.body(_given(1)))
        CHANGES[change](world)
        for rows in (2, 1, 3):
            for _ in range(3):
                assert torch.equal(body(_given(rows)), world.body(_given(rows))), rows
        assert len(walks) > 1
        world.scale.factor, world.kind.shift = 0.5, 0.25
        world.settings.__dict__["on"] = not world.settings.on
        for rows in (1, 2, 3):
            for _ in range(2):
                assert torch.equal(body(_given(rows)), world.body(_given(rows))), rows


@pytest.mark.filterwarnings("ignore:CG906:capture.CaptureWarning")
def test_objects_that_come_and_go_among_the_arguments() -> None:
    """Another one may come to lie where one before was."""

    class Slotted:
        __slots__ = ("__weakref__", "factor")

        def __init__(self, factor: float) -> None:
            self.factor = factor

    def by_static(x: torch.Tensor, scale: Any) -> Any:
        return x * scale.factor

    for kind in (Scale, Slotted):
        body = capture(by_static, static=("scale",), max_recordings=32)
        for number in range(6):
            given = kind(float(number))
            for _ in range(4):
                assert torch.equal(body(_given(1 + number % 4), given), by_static(_given(1 + number % 4), given))
            del given


def test_modules_that_are_looked_up_by_names_are_looked_up_for_each_key() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        found = sys.modules.get("settings_of_a_" + "test")
        return x * (2.0 if found is None else found.factor)

    captured, made = capture(body), types.ModuleType("settings_of_a_test")
    made.__dict__["factor"] = 3.0
    try:
        for _ in range(3):
            assert torch.equal(captured(_given(1)), body(_given(1)))
        sys.modules["settings_of_a_test"] = made
        for factor in (3.0, 4.0):
            made.__dict__["factor"] = factor
            for rows in (2, 1, 3):
                for _ in range(3):
                    assert torch.equal(captured(_given(rows)), body(_given(rows))), (factor, rows)
    finally:
        sys.modules.pop("settings_of_a_test", None)


def test_code_that_runs_for_one_key_alone() -> None:
    world = World()

    def body(x: torch.Tensor) -> torch.Tensor:
        return world.scale(x) if len(x) > 2 else x + world.kind.shift

    calls: list[tuple[Any, ...]] = [(_given(rows),) for rows in (1, 1, 2, 2, 3, 3, 1, 2, 3)]
    assert_equal_to_eager(capture(body), calls)
    captured = capture(body)
    for rows in (1, 2, 3, 4, 1, 2, 3, 4, 3):
        assert torch.equal(captured(_given(rows)), body(_given(rows)))
    world.scale.factor = 11.0
    for rows in (1, 2, 3, 4, 1, 2, 3, 4, 3):
        assert torch.equal(captured(_given(rows)), body(_given(rows)))
