"""A million steps over a path of three captured functions: memory stays flat and calls do not slow down."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import define
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.setting import Outcome, Setting
from benchmarks.timing import Figure, undisturbed
from capture import capture, mark_step_begin, recordings

WIDTH, SAMPLES, TIMED, BURST = 64, 20, 2000, 50
Path3 = Callable[[Tensor], Tensor]


@define(kw_only=True)
class Sample:
    """After ``steps`` steps: bytes of this process and of torch's allocator, host microseconds a step."""

    steps: int
    rss: int
    allocated: int
    reserved: int
    host_us: float


def measure(setting: Setting) -> Outcome:
    """Take 20 samples, of which the first warms up and is only shown. The garbage collector is off, so that cycles
    would show as memory that grows."""
    step, eager, functions = _path(setting)
    inputs = [torch.randn(1, WIDTH, device=setting.device) for _ in range(4)]
    wrong = []
    samples = []
    done = 0
    begin = time.perf_counter()
    with undisturbed():
        for number in range(SAMPLES):
            until = setting.steps * (number + 1) // SAMPLES
            timed = min(TIMED, until - done)
            host = _timed(step, inputs, timed, setting)
            for index in range(done + timed, until):
                step(inputs[index % 4])
            done = until
            if not torch.equal(step(inputs[0]), eager(inputs[0])):
                wrong.append(f"soak: after {done} steps the result differs from eager")
            samples.append(_sample(done, host, setting))
    seconds = time.perf_counter() - begin
    totals = [recordings(function) for function in functions]
    wrong += [f"soak: not one recording and replays: {total}" for total in totals
              if total.recordings != 1 or total.eager_calls]  # fmt: skip
    rows = [("steps", "RSS MiB", "allocated KiB", "reserved MiB", "host us a step")]
    rows += [
        (f"{sample.steps:,}", f"{sample.rss / 2**20:.2f}", f"{sample.allocated / 2**10:.1f}",
         f"{sample.reserved / 2**20:.1f}", f"{sample.host_us:.2f}")
        for sample in samples
    ]  # fmt: skip
    details = {"replays": [total.replays for total in totals], "seconds": round(seconds, 1), "steps": done}
    return Outcome(figures=_figures(samples), rows=tuple(rows), wrong=tuple(wrong), details=details)


def _figures(samples: list[Sample]) -> tuple[Figure, ...]:
    after_warming = samples[1:]
    first, last = after_warming[0], after_warming[-1]
    tenth = max(SAMPLES // 10, 1)
    early = statistics.mean(sample.host_us for sample in after_warming[:tenth])
    late = statistics.mean(sample.host_us for sample in after_warming[-tenth:])
    growth = {
        "RSS": ((last.rss - first.rss) / 2**20, 8.0),
        "allocated": ((last.allocated - first.allocated) / 2**20, 0.0),
        "reserved": ((last.reserved - first.reserved) / 2**20, 0.0),
    }
    figures = [
        Figure(name=f"{name}, last sample less second", unit="MiB", values=(value,), bar=bar)
        for name, (value, bar) in growth.items()
    ]
    host = Figure(name="host time, last tenth", unit="/ first tenth", values=(late / early,), bar=1.10,
                  detail=f"{late:.2f} and {early:.2f} us a step")  # fmt: skip
    return (*figures, host)


def _path(setting: Setting) -> tuple[Path3, Path3, list[Path3]]:
    torch.manual_seed(0)
    with torch.device(setting.device):
        layer_1, layer_2, layer_3 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def first(x: Tensor) -> Tensor:
        return F.gelu(layer_1(x))

    def second(x: Tensor) -> Tensor:
        return F.gelu(layer_2(x))

    def third(x: Tensor) -> Tensor:
        return F.gelu(layer_3(x))

    f, g, h = capture(first), capture(second), capture(third)

    def step(x: Tensor) -> Tensor:
        mark_step_begin()
        return h(g(f(x)))

    def eager(x: Tensor) -> Tensor:
        return third(second(first(x)))

    return step, eager, [f, g, h]


def _timed(step: Path3, inputs: list[Tensor], count: int, setting: Setting) -> float:
    """Host microseconds a step, issued in bursts with the device idle before each: their median."""
    took_us = []
    for _ in range(max(count // BURST, 1)):
        setting.synchronize()
        begin = time.perf_counter()
        for index in range(BURST):
            step(inputs[index % 4])
        took_us.append((time.perf_counter() - begin) * 1e6 / BURST)
    return statistics.median(took_us)


def _sample(steps: int, host_us: float, setting: Setting) -> Sample:
    setting.synchronize()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return Sample(
        steps=steps, host_us=host_us, rss=pages * os.sysconf("SC_PAGE_SIZE"),
        allocated=torch.cuda.memory_allocated() if setting.on_gpu else 0,
        reserved=torch.cuda.memory_reserved() if setting.on_gpu else 0,
    )  # fmt: skip
