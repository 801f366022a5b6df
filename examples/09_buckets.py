"""Serving: requests of any size, padded to a few sizes that were recorded before the first of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import capture, recordings, warmup
from examples.gain import gain

torch.manual_seed(0)
torch.set_num_threads(1)
SIZES = (1, 2, 4, 8)
layers = [module for _ in range(12) for module in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))]
model = nn.Sequential(*layers, nn.Linear(16, 4)).eval()


@capture(max_recordings=len(SIZES))
def score(batch: Tensor) -> Tensor:
    scores: Tensor = model(batch)
    return scores


def serve(rows: Tensor) -> Tensor:
    """Scores of any number of rows, up to the largest size."""
    size = next(size for size in SIZES if size >= len(rows))
    return score(F.pad(rows, (0, 0, 0, size - len(rows))))[: len(rows)]


with torch.inference_mode():
    report = warmup(score).cases([(torch.zeros(size, 16),) for size in SIZES], progress=False)
    print("recorded before the first request:", report.recorded)
    requests = [torch.randn(rows, 16) for rows in (1, 3, 8, 5, 2, 7)]
    print("as eager:", all(torch.allclose(serve(rows), model(rows), atol=1e-4) for rows in requests))
    print("replays:", recordings(score).replays, "- eager calls:", recordings(score).eager_calls)
    rows = requests[1]
    print(gain(lambda: model(rows), lambda: serve(rows)))
    print("why: 37 operators are launched from C into memory that is known, also for the row of padding")
