"""Host time of one call: one small input, and eight; wall time of a call with a large one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.graphs import Hands, compiled
from benchmarks.gpu.setting import Outcome, Setting, host_us, ratio, sides_of, wall_ms
from benchmarks.timing import Figure, Side, undisturbed
from capture import capture, recordings

SIZE = 64  # float32: 256 bytes
LARGE = 1 << 24  # float32: 64 MiB
ADDRESSES = 4  # inputs come from as many places in turn, as they do in real programs
CALLS = 100  # with a large input, between two looks at the clock
Inputs = list[list[Tensor]]


def one(x: Tensor) -> Tensor:
    """One kernel, one input."""
    return x * 2.0


def eight(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor) -> Tensor:
    """Seven kernels, eight inputs."""
    return a + b + c + d + e + f + g + h


def measure(setting: Setting) -> Outcome:
    """Host microseconds a call, median of 7 x 2,000, and ours over by hand; wall microseconds with 64 MiB."""
    figures: list[Figure] = []
    wrong: list[str] = []
    for name, count in (("1 input", 1), ("8 inputs", 8)):
        compared, mistakes = _compare(name, count, setting)
        figures += compared
        wrong += mistakes
    compared, mistakes = _large(setting)
    figures += compared
    wrong += mistakes
    return Outcome(figures=tuple(figures), wrong=tuple(wrong))


def _compare(name: str, count: int, setting: Setting) -> tuple[list[Figure], list[str]]:
    body = one if count == 1 else eight
    captured, bound = capture(body, max_recordings=8), capture(body, max_recordings=8, inputs="bind")
    inputs = [[torch.randn(SIZE, device=setting.device) for _ in range(count)] for _ in range(ADDRESSES)]
    buffers = [torch.empty(SIZE, device=setting.device) for _ in range(count)]
    hand = Hands(setting).capture(lambda: body(*buffers))
    fresh: list[Iterator[list[Tensor]]] = [itertools.cycle(inputs) for _ in range(6)]

    def by_hand() -> Tensor:
        for buffer, value in zip(buffers, next(fresh[1]), strict=True):
            buffer.copy_(value)
        hand.replay()
        return hand.output

    def batched() -> Tensor:
        torch._foreach_copy_(buffers, next(fresh[2]))
        hand.replay()
        return hand.output

    reduced = compiled(body, setting)
    sides: dict[str, Side] = {
        "eager": lambda: body(*next(fresh[0])),
        "by hand: copy_ each, replay": by_hand,
        "by hand: one _foreach_copy_, replay": batched,
        "ours": lambda: captured(*next(fresh[3])),
        "ours, the same tensors every time": lambda: captured(*inputs[0]),
        "ours, bound": lambda: bound(*next(fresh[4])),
        "ours, bound, the same tensors every time": lambda: bound(*inputs[0]),
        'compile(mode="reduce-overhead")': lambda: reduced(*next(fresh[5])),
    }
    wrong = _mistakes(name, captured, body, inputs) + _mistakes(f"{name}, bound", bound, body, inputs)
    times = sides_of(host_us(list(sides.values()), setting, calls=setting.pick(2000, 20), burst=setting.pick(100, 10)))
    figures = [
        Figure(name=f"{name}, {side}", unit="us a call, host", values=values)
        for side, values in zip(sides, times, strict=True)
    ]
    figures.append(ratio(f"{name}, ours", "/ by hand, copy_ each", times[3], times[1], 0.85 if count == 1 else 0.4))
    figures.append(ratio(f"{name}, ours, bound", "/ by hand, copy_ each", times[5], times[1], None))
    figures.append(ratio(f"{name}, ours", "/ reduce-overhead", times[3], times[7], 0.15 if count == 1 else None))
    return figures, wrong


def _mistakes(name: str, captured: Callable[..., Tensor], body: Callable[..., Tensor], inputs: Inputs) -> list[str]:
    wrong = [f"{name}: call {number} differs from eager" for number, values in enumerate(inputs * 3)
             if not torch.equal(captured(*values), body(*values))]  # fmt: skip
    totals = recordings(captured)
    if totals.eager_calls or totals.recordings != 1:
        wrong.append(f"{name}: not one recording and replays: {totals}")
    return wrong


def _large(setting: Setting) -> tuple[list[Figure], list[str]]:
    """Wall time: the kernel reads its input once, a copy reads and writes it as well."""
    name, size = "64 MiB input", setting.pick(LARGE, LARGE // 64)
    inputs = [[torch.randn(size, device=setting.device)] for _ in range(ADDRESSES)]
    buffer = torch.empty(size, device=setting.device)
    hand, captured = Hands(setting).capture(lambda: one(buffer)), capture(one, max_recordings=8)
    fresh = [itertools.cycle(inputs) for _ in range(3)]

    def by_hand() -> None:
        buffer.copy_(next(fresh[0])[0])
        hand.replay()

    sides: dict[str, Side] = {
        "by hand: copy_, replay": by_hand,
        "ours": lambda: captured(*next(fresh[1])),
        "eager": lambda: one(*next(fresh[2])),
    }
    wrong = _mistakes(name, captured, one, inputs)
    with undisturbed():
        times = sides_of(
            [tuple(1e3 * wall_ms(_many(side), setting) / CALLS for side in sides.values()) for _ in range(7)]
        )
    figures = [Figure(name=f"{name}, {side}", unit="us a call, wall", values=values)
               for side, values in zip(sides, times, strict=True)]  # fmt: skip
    figures.append(ratio(f"{name}, ours", "/ by hand, copy_", times[1], times[0], 0.55))
    return figures, wrong


def _many(side: Side) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            side()

    return run
