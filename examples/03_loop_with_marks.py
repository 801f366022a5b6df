"""A loop with marks: two functions in a chain share one pool of memory, and a kept output keeps its values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from capture import capture, mark_step_begin, recordings
from examples.gain import gain

torch.manual_seed(0)
body_net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
head_net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8))


@capture
def body(x: Tensor) -> Tensor:
    change: Tensor = body_net(x)
    return x + change


@capture
def head(h: Tensor) -> Tensor:
    scores: Tensor = head_net(h)
    return scores


with torch.no_grad():
    xs = [torch.randn(4, 64) for _ in range(20)]
    kept = []
    for x in xs:
        mark_step_begin()  # one pass ends, the next begins: memory of the last one may be used again
        h = body(body(x))  # within a step, one output feeds the next function where it lies, without a copy
        kept.append(head(h))  # still held when its step ends: the values move out of the pool first

    expected = []
    for x in xs:
        once = x + body_net(x)
        expected.append(head_net(once + body_net(once)))
    print("equal to eager:", all(map(torch.equal, kept, expected)))
    print(recordings(body))  # two recordings: one for the first place in the step, one for the second
    print(recordings(head))
    print(f"shared pool: {recordings(head).pool_bytes} bytes, kept: {recordings(head).kept_outputs} outputs")


def eager(x: Tensor) -> Tensor:
    once = x + body_net(x)
    scores: Tensor = head_net(once + body_net(once))
    return scores


def captured(x: Tensor) -> Tensor:
    mark_step_begin()
    return head(body(body(x)))


with torch.no_grad():
    print(gain(lambda: eager(xs[0]), lambda: captured(xs[0])))
    print(
        "why: the three recordings read each other's results where they lie; on a CPU these few operators gain little"
    )
