"""A replay against the same operators run eagerly: 8 x (Linear+GELU), and a 4-layer transformer encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.timing import Effort, Figure, alternate
from capture import capture, recordings

WIDTH = 64


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, written out."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``x``: batch, sequence, width."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


def measure(effort: Effort) -> Iterator[Figure]:
    """Time of captured over eager, without gradients, at batch 1."""
    torch.manual_seed(0)
    linears = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    yield _captured_over_eager("8 x (Linear(64)+GELU), batch 1", linears, torch.randn(1, WIDTH), 0.80, effort)
    encoder = nn.Sequential(*[EncoderLayer() for _ in range(4)]).eval()
    yield _captured_over_eager(
        "transformer, 4 layers of 64, batch 1 x 32", encoder, torch.randn(1, 32, WIDTH), 1.00, effort
    )


def _captured_over_eager(name: str, model: Callable[[Tensor], Tensor], x: Tensor, bar: float, effort: Effort) -> Figure:
    @capture
    def captured(x: Tensor) -> Tensor:
        return model(x)

    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(captured(x), model(x))
        assert recordings(captured).replays >= 1
        rounds = alternate([lambda: captured(x), lambda: model(x)], effort)
    fastest = [min(times) for times in zip(*rounds, strict=True)]
    detail = f"captured {fastest[0]:.0f} us, eager {fastest[1]:.0f} us"
    return Figure(name=name, unit="captured / eager", values=tuple(a / b for a, b in rounds), bar=bar, detail=detail)
