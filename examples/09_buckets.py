"""Serving: requests of any size, padded to a few sizes that were recorded before the first of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import capture, recordings, warmup
from examples.gain import gain

torch.manual_seed(0)
torch.set_num_threads(1)
SIZES = (1, 2, 4, 8)
layers = [module for _ in range(12) for module in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))]
model = nn.Sequential(*layers, nn.Linear(16, 4)).eval()


@capture(buckets={"batch": {0: SIZES}}, tolerance=1e-4)  # kernels may round differently for another size
def score(batch: Tensor) -> Tensor:
    scores: Tensor = model(batch)
    return scores


with torch.inference_mode():
    report = warmup(score).cases([(torch.randn(8, 16),)], progress=False)
    print("recorded before the first request:", report.recorded)
    requests = [torch.randn(rows, 16) for rows in (1, 3, 8, 5, 2, 7)]
    print("as eager:", all(torch.allclose(score(rows), model(rows), atol=1e-4) for rows in requests))
    print("replays:", recordings(score).replays, "- eager calls:", recordings(score).eager_calls)
    rows = requests[1]
    print(gain(lambda: model(rows), lambda: score(rows)))
    print("why: 37 operators are launched from C into memory that is known, also for the row of padding")
