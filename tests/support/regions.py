"""Blocks, twins and comparisons for tests of regions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import (
    capture,
    config,
    recordings,
)
from capture.tree import step as _step
from capture.tree import thread_trees
from tests.support.device import DEVICE

STEPS = 8


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_step.marks(), "begun", 0)
    thread_trees.forget_trees()
    with torch.enable_grad(), config.patch(cache=False):
        yield


def bits(value: Any) -> Any:
    """A tensor, or None, as bytes."""
    return value.detach().numpy(force=True).tobytes() if isinstance(value, Tensor) else value


def kept(value: Any) -> Any:
    """A detached copy of a tensor, or None."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def assert_same_sums(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Compare results of a backward pass through gradients: bit for bit on a CPU. On a GPU eager itself adds in the
    same order only where autograd's thread made as many nodes before: it orders by their numbers, which each thread
    counts."""
    if DEVICE.type == "cpu":
        assert [*map(bits, one)] == [*map(bits, other)]
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """A block with norms, an activation, products as in attention, dropout and a skip connection."""

    def __init__(self, width: int = 6, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(drop)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        y: Tensor = x + self.drop(torch.tanh(self.b(mixed)))
        return y


Program = Callable[[Any, int], Any]
"""A function of a model and a seed."""


def twins(make: Callable[[], Any]) -> tuple[Any, Any]:
    """The same modules twice."""
    torch.manual_seed(0)
    one = make().to(DEVICE)
    return one, copy.deepcopy(one)


def forward_and_back(model: Any, number: int) -> Tensor:
    """Run the first region and its backward pass."""
    model.zero_grad()
    y: Tensor = model.m[0](inputs(number))
    y.square().mean().backward()
    return y


def both(program: Program, mine: Any, theirs: Any, steps: int = STEPS) -> None:
    """Run ``program(model, number)`` with each twin, step by step from the same seeds, and compare all it gives, all
    parameters and their gradients."""
    for number in range(steps):
        seen = []
        for model, enabled in ((theirs, False), (mine, True)):
            torch.manual_seed(number)
            with config.patch(enabled=enabled):
                result = program(model, number)
            state = [(bits(p), bits(p.grad)) for p in model.parameters()]
            state += [bits(b) for b in model.buffers()]
            seen.append([[bits(r) for r in result] if isinstance(result, (tuple, list)) else bits(result), state])
        names = [name for name, _ in (*mine.named_parameters(), *mine.named_buffers())]
        wrong = [name for name, a, b in zip(names, seen[0][1], seen[1][1], strict=True) if a != b]
        assert not wrong, f"step {number}"
        assert seen[0] == seen[1], f"step {number}"


def inputs(number: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*(shape or (4, 6)), generator=generator, device="cpu").to(DEVICE)


class Wrapped(nn.Module):
    """Holds modules that a test uses as it likes; ``f`` is captured in one of the twins."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.m = nn.ModuleList(modules)


def captured_twins(*make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    mine, theirs = twins(lambda: Wrapped(*(one() for one in make)))
    for one in mine.m:
        capture(one, **options)
    return mine, theirs


def replayed(mine: Any, least: int = 1) -> None:
    for one in mine.m:
        assert recordings(one).replays >= least, (recordings(one), [(e.kind, e.detail) for e in recordings(one).events])


class Several(nn.Module):
    """A module with a structure of outputs: two with gradients, one of them twice, one of integers, and Python
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    @override
    def forward(self, x: Tensor) -> dict[str, Any]:
        one, two = torch.relu(self.a(x)), torch.sigmoid(self.b(x))
        return {"one": one, "more": [two, (one, "text", 3)], "best": two.argmax(-1), "mean": one.detach().mean()}


EAGER: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input": lambda m, x: (x, m(x)),
    "a view of an input": lambda m, x: (x.t(), m(x)),
    "a weight": lambda m, x: (m.b.weight, m(x)),
    "an output and a view of it": lambda m, x: (y := m(x), y[:2]),
    "a hook inside": lambda m, x: _hooked(m(x)) * 2,
    "retain_grad inside": lambda m, x: _retained(m(x)) * 2,
    "a reentrant checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "torch.func.grad inside": lambda m, x: m(x) * torch.func.grad(lambda row: (row**3).sum())(x.detach()).sum(),
}


def _hooked(y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * 3)
    return y


def _retained(y: Tensor) -> Tensor:
    y.retain_grad()
    return y
