"""Host time of one call: one small input, and eight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu.graphs import Hands
from benchmarks.gpu.setting import Outcome, Setting, host_us, ratio, sides_of
from benchmarks.timing import Figure, Side
from capture import capture, recordings

SIZE = 64  # float32: 256 bytes
ADDRESSES = 4  # inputs come from as many places in turn, as they do in real programs


def one(x: Tensor) -> Tensor:
    """One kernel, one input."""
    return x * 2.0


def eight(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """Seven kernels, eight inputs."""
    return a + b + c + d + e + f + g + h


def measure(setting: Setting) -> Outcome:
    """Host microseconds a call, median of 7 x 2,000, and ours over by hand."""
    figures: list[Figure] = []
    wrong: list[str] = []
    for name, count in (("1 input", 1), ("8 inputs", 8)):
        found, mistakes = _compare(name, count, setting)
        figures += found
        wrong += mistakes
    return Outcome(figures=tuple(figures), wrong=tuple(wrong))


def _compare(name: str, count: int, setting: Setting) -> tuple[list[Figure], list[str]]:
    body = one if count == 1 else eight
    captured = capture(body, max_recordings=8)
    inputs = [[torch.randn(SIZE, device=setting.device) for _ in range(count)] for _ in range(ADDRESSES)]
    buffers = [torch.empty(SIZE, device=setting.device) for _ in range(count)]
    hand = Hands(setting).capture(lambda: body(*buffers))
    fresh: list[Iterator[list[Tensor]]] = [itertools.cycle(inputs) for _ in range(5)]

    def by_hand() -> Tensor:
        for buffer, value in zip(buffers, next(fresh[1]), strict=True):
            buffer.copy_(value)
        hand.replay()
        return hand.output

    def batched() -> Tensor:
        torch._foreach_copy_(buffers, next(fresh[2]))
        hand.replay()
        return hand.output

    sides: dict[str, Side] = {
        "eager": lambda: body(*next(fresh[0])),
        "by hand: copy_ each, replay": by_hand,
        "by hand: one _foreach_copy_, replay": batched,
        "ours": lambda: captured(*next(fresh[3])),
        "ours, the same tensors every time": lambda: captured(*inputs[0]),
    }
    wrong = [f"{name}: call {number} differs from eager" for number, values in enumerate(inputs * 3)
             if not torch.equal(captured(*values), body(*values))]  # fmt: skip
    totals = recordings(captured)
    if totals.eager_calls or totals.recordings != 1:
        wrong.append(f"{name}: not one recording and replays: {totals}")
    times = sides_of(host_us(list(sides.values()), setting, calls=setting.pick(2000, 20), burst=setting.pick(100, 10)))
    figures = [
        Figure(name=f"{name}, {side}", unit="us a call, host", values=values)
        for side, values in zip(sides, times, strict=True)
    ]
    figures.append(ratio(f"{name}, ours", "/ by hand, copy_ each", times[3], times[1], 1.0))
    return figures, wrong
