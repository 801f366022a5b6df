"""Blocks and checks for tests of ``make_graphed_callables``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import config, recordings
from capture.tree import thread_trees
from tests.support.device import DEVICE, rng_state

STEPS = 6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.enable_grad(), config.patch(cache=False):
        yield


class Block(nn.Module):
    """A block with written buffers, dropout, and a skip connection where the widths allow one."""

    def __init__(self, width: int = 6, out: int = 6, drop: float = 0.25) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(width, out), nn.BatchNorm1d(out), nn.Dropout(drop)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(torch.tanh(self.norm(self.a(x))))
        return x + y if x.shape == y.shape else y


def rand(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    """Values that follow from the seed; no draw from a default generator."""
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)
    return values.requires_grad_(grad)


def bits(value: Any) -> Any:
    """A tensor as bytes, members of a container one by one."""
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().cpu().contiguous().flatten().view(torch.uint8).tolist(),
        )
    if isinstance(value, dict):
        return {name: bits(member) for name, member in value.items()}
    return [bits(member) for member in value] if isinstance(value, (tuple, list)) else value


def same(one: Any, other: Any) -> None:
    """Check that two values are equal bit for bit."""
    assert bits(one) == bits(other)


def state(*modules: nn.Module) -> list[Any]:
    """Parameters, their gradients and buffers."""
    found: list[Any] = []
    for module in modules:
        found += [(bits(p), bits(p.grad)) for p in module.parameters()] + [bits(b) for b in module.buffers()]
    return found


def twins(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """The same module twice."""
    torch.manual_seed(0)
    one = make().to(DEVICE)
    return one, copy.deepcopy(one)


def bodies(*functions: Any) -> int:
    """How often bodies and backward passes ran."""
    return sum(recordings(function).body_runs for function in functions)


def both(program: Callable[[Any, int], Any], mine: Any, theirs: Any, number: int) -> None:
    """Run ``program(model, number)`` with each twin from the same seed; results and state are equal."""
    found = []
    for one in (theirs, mine):
        torch.manual_seed(number)
        results = bits(program(one, number))
        found.append((results, state(one), bits(rng_state())))
    assert found[0] == found[1], number


def train(model: Any, number: int, rows: int = 4) -> Tensor:
    """One training step without the optimizer."""
    model.zero_grad()
    x = rand(rows, 6, seed=number)
    y: Tensor = model(x)
    F.mse_loss(y, torch.ones_like(y)).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
    return y
