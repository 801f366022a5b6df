"""Functions whose globals are a dict that was made by hand: it has no builtins, or its own."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import capture, config, recordings
from tests.support.device import DEVICE

Body = Callable[[torch.Tensor], torch.Tensor]


def _written(x: Any) -> Any:
    return x * len(scale)  # type: ignore[name-defined]  # noqa: F821


class Missing(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        if name != "scale":
            raise KeyError(name)
        return [1] * self["number"]


def _function(space: dict[str, Any]) -> Body:
    return types.FunctionType(_written.__code__, space)


def _longer(space: dict[str, Any]) -> None:
    space["scale"] = [1] * 3


def _other_builtins(space: dict[str, Any]) -> None:
    space["__builtins__"]["len"] = lambda _: 3


def _other_number(space: dict[str, Any]) -> None:
    space["number"] = 3


SPACES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None], bool]] = {
    "no builtins": (lambda: {"scale": [1, 1]}, _longer, True),
    "few builtins": (lambda: {"scale": [1], "__builtins__": {"len": lambda _: 2}}, _other_builtins, True),
    "a class of its own": (lambda: Missing(number=2), _other_number, False),
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("is_below", [False, True], ids=["captured", "called"])
@pytest.mark.parametrize("name", SPACES)
def test_calls_are_as_in_eager_code(name: str, is_below: bool) -> None:
    make, change, replays = SPACES[name]
    space = make()
    names, function, x = {*space}, _function(space), torch.ones(3, device=DEVICE)
    body: Body = (lambda x: function(x) + 1) if is_below else function
    captured = capture(body)
    with torch.no_grad(), config.patch(strict=True):
        for number in (2.0, 3.0):
            for _ in range(4):
                assert captured(x)[0].item() == number + is_below
            assert {*space} == names
            change(space)
    assert bool(recordings(captured).replays) == replays
