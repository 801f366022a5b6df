"""Time of the same kernels ordered by data dependencies (``schedule="auto"``), over their time in the recorded order.

Both run on the same inputs and draws and are compared bit for bit, half of the calls on poisoned memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu.setting import Outcome, Setting, ratio, wall_ms
from benchmarks.timing import Figure
from capture import capture, config, recordings

CALLS, ROUNDS, BURST = 50, 9, 50
UNTIL_CHOSEN = 60


def _mlp(width: int) -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, width))


class Averaged(nn.Module):
    """Eight small MLPs on one input."""

    shape = (1, 64)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_mlp(64) for _ in range(8))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, 64."""
        return torch.stack([part(x) for part in self.parts]).mean(0)


class Mixture(nn.Module):
    """A dense mixture of eight experts."""

    shape = (16, 256)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.parts = nn.Linear(256, 8), nn.ModuleList(_mlp(256) for _ in range(8))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, 256."""
        shares = self.gate(x).softmax(-1)
        return torch.stack([part(x) * shares[:, at, None] for at, part in enumerate(self.parts)]).sum(0)


class BothWays(nn.Module):
    """LSTM cells over 20 steps from both ends."""

    shape = (20, 1, 64)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.LSTMCell(64, 64), nn.LSTMCell(64, 64)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``x``: steps, batch, 64."""
        forth = back = (x.new_zeros(x.shape[1], 64), x.new_zeros(x.shape[1], 64))
        found = []
        for step in range(len(x)):
            forth, back = self.left(x[step], forth), self.right(x[-1 - step], back)
            found += [forth[0], back[0]]
        return torch.stack(found)


class Chain(nn.Module):
    """Sixteen layers, each of which needs the one before it, so that there is one order alone."""

    shape = (1, 64)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, 64."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


WORKS: dict[str, tuple[Callable[[], Any], float]] = {
    "8 MLPs averaged": (Averaged, 0.45), "mixture of 8 experts": (Mixture, 0.40),
    "bidirectional LSTM cells": (BothWays, 0.65), "chain of 16 layers": (Chain, 1.01),
}  # fmt: skip


def measure(setting: Setting) -> Outcome:
    """Milliseconds of 50 calls from an idle device to an idle device; bars are shares of the recorded order's time."""
    figures: list[Figure] = []
    rows, wrong = [("work", "order")], []
    for name, (make, bar) in WORKS.items():
        torch.manual_seed(0)
        with torch.device(setting.device):
            model = make()
            inputs = [torch.randn(model.shape) for _ in range(setting.pick(CALLS, 4))]
        recorded, auto = (capture(model.forward, schedule=order) for order in ("recorded", "auto"))
        for call in (recorded, auto):
            for at in range(setting.pick(UNTIL_CHOSEN, 4)):
                call(inputs[at % len(inputs)])
                setting.synchronize()
        for at, x in enumerate(inputs):
            with config.patch(poison=at % 2 == 1):
                if not torch.equal(recorded(x).clone(), auto(x)):
                    wrong.append(f"{name}: call {at} differs from the recorded order")
        above, below = [], []
        for _ in range(setting.pick(ROUNDS, 2)):
            above.append(wall_ms(functools.partial(_burst, auto, inputs[0]), setting))
            below.append(wall_ms(functools.partial(_burst, recorded, inputs[0]), setting))
        figures.append(ratio(name, "/ recorded order", above, below, bar))
        rows.append((name, "; ".join(size.order for size in recordings(auto).sizes)))
    return Outcome(figures=tuple(figures), rows=tuple(rows), wrong=tuple(wrong))


def _burst(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    for _ in range(BURST):
        call(x)
