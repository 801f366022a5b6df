"""Every call is counted once, as one kind, whatever becomes of it."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureError, UncapturableError, capture, config, mark_step_begin, recordings, release, step


def counted(function: Any) -> dict[str, int]:
    return recordings(function).calls()


def bodies() -> dict[str, Callable[..., Any]]:
    layer, kept = nn.Linear(4, 4), torch.zeros(4)
    lines: list[Any] = []

    def plain(x: Tensor) -> Tensor:
        return torch.relu(layer(x))

    def writes(x: Tensor) -> Tensor:
        kept.add_(x.detach().mean())
        return x + kept

    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    def raises(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three")
        return x.exp()

    def grows(x: Tensor) -> Tensor:
        lines.append(x.shape)
        return x + len(lines)

    def draws(x: Tensor) -> Tensor:
        return x + torch.rand_like(x) + random.random()

    return {body.__name__: body for body in (plain, writes, branches, raises, grows, draws)}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", ["plain", "writes", "branches", "raises", "grows", "draws"])
@pytest.mark.parametrize(
    "options", [{}, {"warmup": 2}, {"max_recordings": 1}, {"verify": "always"}, {"fallback": "error"}]
)
def test_calls_of_random_programs_add_up(name: str, options: dict[str, Any]) -> None:
    choose = random.Random(f"{name} {options}")
    captured = capture(**options)(bodies()[name])
    calls = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(60):
            x = torch.randn(choose.choice([1, 2, 2, 2, 3]), 4, requires_grad=choose.random() < 0.2)
            around: Any = choose.choice([contextlib.nullcontext(), contextlib.nullcontext(), torch.no_grad(), step()])
            if choose.random() < 0.1:
                around = config.patch(enabled=False)
            if choose.random() < 0.2:
                mark_step_begin()
            with around, contextlib.suppress(ValueError, UncapturableError):
                calls += 1
                captured(x)
    assert sum(counted(captured).values()) == calls, counted(captured)


def test_what_each_kind_is() -> None:
    captured = capture(lambda x: x * 2)
    outer = capture(lambda x: captured(x) + 1)
    x = torch.ones(2)
    for _ in range(5):
        captured(x)
    assert counted(captured) == {
        "replayed": 3, "recorded": 1, "watched": 1, "warm-up": 0, "measured": 0, "eager": 0, "inline": 0,
        "refused": 0,
    }  # fmt: skip
    outer(x)
    with config.patch(enabled=False):
        captured(x)
    nothing: tuple[Any, ...] = ()
    with pytest.raises(TypeError):
        captured(*nothing)
    assert counted(captured)["inline"] == 3
    refuses = capture(fallback="error")(lambda x: x + random.random())
    with pytest.raises(CaptureError):
        refuses(x)
    assert counted(refuses)["refused"] == sum(counted(refuses).values()) == 1


def test_calls_add_up_where_recordings_are_dropped() -> None:
    """``str(recordings(f))`` still says how often it recorded, and its kinds of calls add up to all calls."""
    layers = [nn.Linear(4, 4) for _ in range(3)]

    @capture
    def replaced(x: Tensor) -> Tensor:
        return torch.relu(layers[0](x)) * layers[1].in_features

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for number in range(30):
            replaced(torch.ones(2, 4))
            if number % 4 == 3:
                layers[1] = nn.Linear(number + 4, 4)
            if number % 7 == 6:
                release(replaced)
    line = str(recordings(replaced))
    parts = {kind: int(count) for count, kind in re.findall(r"(\d+) ([a-z-]+)", line.split("calls:")[1].split(";")[0])}
    assert line.split("; ")[1] == f"{recordings(replaced).recordings} recordings"
    assert recordings(replaced).recordings > len(recordings(replaced).sizes)
    assert sum(parts.values()) == 30, line
    assert ": 30 calls: " in line
