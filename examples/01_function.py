"""A function: two runs of its body, then replays. What it reads is found; what you change is seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import capture, recordings
from examples.gain import gain

torch.manual_seed(0)
net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())])


@capture  # nothing to declare: the weights of `net` are found by watching the first call
def score(x: Tensor, *, scale: float = 1.0) -> Tensor:
    scores: Tensor = net(x)
    return scores * scale


with torch.no_grad():  # calls that need gradients run eagerly
    xs = [torch.randn(1, 64) for _ in range(10)]
    ys = [score(x) for x in xs]
    print("equal to eager:", all(torch.equal(y, net(x) * 1.0) for x, y in zip(xs, ys, strict=True)))
    # Two runs: one watched, one recorded. One, when a process before this one left its plan (see 04_plan_cache.py).
    print("calls: 10, runs of the body:", recordings(score).body_runs)
    print(recordings(score))

    # A Python value belongs to the key: another value is another recording, never a wrong number.
    print("another scale:", torch.equal(score(xs[0], scale=2.0), net(xs[0]) * 2.0))

    # A weight that moved is read where it is now: the recording is bound again, not made again.
    net[0].weight = nn.Parameter(torch.randn(64, 64))
    print("another weight:", torch.equal(score(xs[0]), net(xs[0]) * 1.0), "- rebinds:", recordings(score).rebinds)

    print(gain(lambda: net(xs[0]) * 1.0, lambda: score(xs[0])))
    print("why: a call launches 17 operators; on a CPU most of its time is their own work, on a GPU nearly none is")
