"""More than twenty real models through ``torch.compile``: our backend beside ``backend="cudagraphs"``, forward passes
and training steps, in one run, and each bit for bit what the same graphs give without recordings."""

from __future__ import annotations

import copy
import logging
import math
import statistics
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from benchmarks.gpu.setting import Outcome, Setting, last_lines, wall_ms
from benchmarks.gpu.zoo import NETS, Net
from benchmarks.timing import Figure, undisturbed
from capture import CaptureWarning, mark_step_begin, recordings
from capture import reset as reset_captured
from capture.integrations.compile import graphs

WARM, SEEDS, ROUNDS, STEPS = 5, 4, 7, 20
PLAIN, THEIRS, OURS = "aot_eager", "cudagraphs", "capture"
BAR = 0.95
HEADER = ("model", "pass", "equal", "recordings", "eager calls", "skips of cudagraphs", "ms eager", "ms cudagraphs",
          "ms ours", "ratio", "MiB cudagraphs", "MiB ours")  # fmt: skip
Step = Callable[[int], list[Tensor]]


@define
class Side:
    """One backend's copy of a model. ``step``: of a seed, gives what has to be equal."""

    step: Step
    nbytes: int = 0
    """Memory that torch reserved while it warmed up."""
    times: list[float] = field(factory=list)


def measure(setting: Setting) -> Outcome:
    """A row a model and pass; the geometric means of all."""
    logging.getLogger("torch").setLevel(logging.ERROR)  # the table counts what is skipped
    rows: list[tuple[str, ...]] = [HEADER]
    wrong: list[str] = []
    ratios: dict[str, list[float]] = {"forward": [], "training": []}
    for net in NETS:
        for kind, found in ratios.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the table says what is left out
                    row, ratio, mistakes = _compared(net, kind, setting)
            except Exception as error:  # noqa: BLE001 - the other models still run
                print("".join(traceback.format_exc().splitlines(keepends=True)[-8:]), flush=True)
                row, ratio = (net.name, kind, "FAILED", last_lines(error), *[""] * (len(HEADER) - 4)), None
                mistakes = [f"{net.name}, {kind}: failed"]
            rows.append(row)
            wrong += mistakes
            found += [ratio] if ratio is not None else []
            print("  ".join(row), flush=True)
            _forget(setting)
    figures = [_mean(kind, found) for kind, found in ratios.items() if found]
    if any(ratios.values()):
        figures.append(_mean("all", [one for found in ratios.values() for one in found], BAR))
    return Outcome(figures=tuple(figures), rows=tuple(rows), wrong=tuple(wrong))


def _mean(kind: str, ratios: Sequence[float], bar: float | None = None) -> Figure:
    """The geometric mean, and how many models are in it."""
    value = math.exp(statistics.fmean(map(math.log, ratios)))
    return Figure(name=f"ours, {kind}", unit='/ backend="cudagraphs", geometric mean', values=(value,), bar=bar,
                  detail=f"{len(ratios)} models and passes, {min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


def _forget(setting: Setting) -> None:
    reset_captured()
    torch.compiler.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()


def _compared(net: Net, kind: str, setting: Setting) -> tuple[tuple[str, ...], float, list[str]]:
    model = net.build(setting)
    inputs = [net.inputs(setting, seed) for seed in range(SEEDS)]
    torch._dynamo.utils.counters.clear()
    eager = Side(_step(copy.deepcopy(model), None, kind, inputs))
    sides = {name: _warmed(model, name, kind, inputs, setting) for name in (PLAIN, THEIRS, OURS)}
    expected = [_kept(sides[PLAIN].step(seed)) for seed in range(SEEDS)]
    equal = {name: all(_same(_kept(sides[name].step(seed)), expected[seed]) for seed in range(SEEDS))
             for name in (THEIRS, OURS)}  # fmt: skip
    skips = sum(count for name, count in torch._dynamo.utils.counters["inductor"].items() if "cudagraph_skip" in name)
    _time([eager, sides[THEIRS], sides[OURS]], setting)
    counted = [recordings(graph) for graph in graphs()]
    made, slow = sum(one.recordings for one in counted), sum(one.eager_calls for one in counted)
    ms = [statistics.median(one.times) for one in (eager, sides[THEIRS], sides[OURS])]
    mistakes = [] if equal[OURS] else [f"{net.name}, {kind}: not what the graphs give without recordings"]
    if not made:
        mistakes.append(f"{net.name}, {kind}: never recorded")
    said = "yes" if all(equal.values()) else f"ours {equal[OURS]}, cudagraphs {equal[THEIRS]}"
    ratio = statistics.median(a / b for a, b in zip(sides[OURS].times, sides[THEIRS].times, strict=True))
    return (
        net.name, kind, said, str(made), str(slow), str(skips), *[f"{one:.3f}" for one in ms], f"{ratio:.3f}",
        *[f"{sides[name].nbytes / 2**20:.0f}" for name in (THEIRS, OURS)],
    ), ratio, mistakes  # fmt: skip


def _warmed(model: nn.Module, backend: str, kind: str, inputs: list[dict[str, Tensor]], setting: Setting) -> Side:
    twin = copy.deepcopy(model)
    before = _reserved(setting)
    side = Side(_step(twin, backend, kind, inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(WARM):
            mark_step_begin()
            side.step(number % SEEDS)
    side.nbytes = _reserved(setting) - before
    return side


def _reserved(setting: Setting) -> int:
    if not setting.on_gpu:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _step(model: nn.Module, backend: str | None, kind: str, inputs: list[dict[str, Tensor]]) -> Step:
    """A forward pass, or a training step without its optimizer: eager, or through a backend."""
    call: Any = model if backend is None else torch.compile(model, backend=backend)
    parameters = list(model.parameters())

    def forward(seed: int) -> list[Tensor]:
        with torch.no_grad():
            return [call(**inputs[seed]).logits]

    def train(seed: int) -> list[Tensor]:
        for one in parameters:
            one.grad = None
        with torch.enable_grad():
            loss = call(**inputs[seed]).logits.float().square().mean()
            loss.backward()
        return [loss.detach(), *[one.grad for one in parameters if one.grad is not None]]

    return forward if kind == "forward" else train


def _kept(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [one.clone() for one in tensors]


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _time(sides: Sequence[Side], setting: Setting) -> None:
    """Wall milliseconds a step, rounds in turn."""
    steps = setting.pick(STEPS, 2)

    def several(side: Side) -> None:
        for number in range(steps):
            mark_step_begin()
            side.step(number % SEEDS)

    with undisturbed():
        for number in range(setting.pick(ROUNDS, 2)):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.times.append(wall_ms(lambda side=side: several(side), setting) / steps)  # type: ignore[misc]
