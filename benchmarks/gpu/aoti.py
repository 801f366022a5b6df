"""A transformer block as a package of AOTInductor, captured (alone, and between captured functions) and not captured.

It runs in a process of its own, as torch's loader crashes on some machines.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu import fleet
from benchmarks.gpu.fleet import Job, Limits, Measure, Result
from benchmarks.gpu.setting import Outcome, Setting, ratio, wall_ms
from benchmarks.timing import Figure, undisturbed
from capture import capture, mark_step_begin, recordings
from capture.integrations.aoti import entry_point

BATCHES, LENGTH, SEEDS = (1, 4, 16), 32, 4
ROUNDS, CALLS = 7, 200
PACKAGE, OURS, CHAIN, OUR_CHAIN = "package", "ours", "chain", "chain, ours"
COMPILED, REDUCE_OVERHEAD = "torch.compile", 'mode="reduce-overhead"'
SIDES = (PACKAGE, OURS, CHAIN, OUR_CHAIN, COMPILED, REDUCE_OVERHEAD)
ALONE = 1  # the one batch that torch.compile is measured at too, so that it compiles once
Call = Callable[[Tensor], Tensor]
JOB: Job = ("block",)
IMPORTED = time.monotonic()  # when the process that compiles began


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input (batch x length x width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change


def before(x: Tensor) -> Tensor:
    """Eager code in front of the package."""
    return torch.tanh(x) * 2 + 1


def after(y: Tensor) -> Tensor:
    """Eager code behind it."""
    return (y * y.sigmoid()).softmax(-1)


def measure(setting: Setting) -> Outcome:
    """Microseconds a call at three batch sizes; results have to be the uncaptured package's, bit for bit."""
    seconds = setting.seconds(150, 600)
    limits = Limits(workers=1, begun_s=1, ready_s=0.8 * seconds, measured_s=0.2 * seconds)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Compiling these few kernels takes less time than starting a pool of processes.
        results, failed = fleet.run(
            prepare, [JOB], setting, limits, TORCHINDUCTOR_CACHE_DIR=folder, TMPDIR=folder,
            CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCHINDUCTOR_COMPILE_THREADS="1",
        )  # fmt: skip
    if JOB not in results:
        return Outcome(wrong=(f"a block as a package: {failed[JOB]}",))
    result = results[JOB]
    rows = [("batch", *[f"us {name}" for name in SIDES], "")]
    for batch in BATCHES:
        us = {name: f"{statistics.median(times):.1f}" for name, times in result["us"][batch].items()}
        rows.append((str(batch), *[us.get(name, "") for name in SIDES], ""))
    rows += [("", *[""] * len(SIDES), f"{name}: {counts}") for name, counts in result["counts"]]
    return Outcome(figures=_figures(result), rows=tuple(rows), wrong=tuple(result["wrong"]), details=result)


def _figures(result: Result) -> tuple[Figure, ...]:
    figures: list[Figure] = []
    for batch in BATCHES:
        us = result["us"][batch]
        bar = 1.0 if batch == 1 else None
        pairs = (OURS, PACKAGE, bar), (OUR_CHAIN, CHAIN, bar), (OURS, COMPILED, None), (OURS, REDUCE_OVERHEAD, None)
        figures += [
            ratio(f"batch {batch}: {name}", f"/ {below}", us[name], us[below], most)
            for name, below, most in pairs
            if below in us
        ]
    return tuple(figures)


# ------------------------------------------------------------------------------------------------ inside the process


@frozen
class Captured:
    """Three functions in a chain, the second a package."""

    first: Any
    model: Any
    second: Any

    def alone(self, x: Tensor) -> Tensor:
        """The package."""
        mark_step_begin()
        y: Tensor = self.model(x)
        return y

    def chain(self, x: Tensor) -> Tensor:
        """All three."""
        mark_step_begin()
        y: Tensor = self.second(self.model(self.first(x)))
        return y


def prepare(job: Job, setting: Setting) -> Measure:
    """Compile, load twice, and compare. It prints each step, so that a run that takes too long shows where it was."""
    del job
    torch.manual_seed(0)
    dtype = setting.pick(torch.bfloat16, torch.float32)
    width, heads = setting.pick((1024, 16), (64, 4))
    block = Block(width, heads).to(setting.device, dtype).eval().requires_grad_(False)
    inputs = {
        batch: [torch.randn(batch, LENGTH, width).to(setting.device, dtype) for _ in range(SEEDS)] for batch in BATCHES
    }
    plain, model = _loaded_twice(block, inputs[4][0])
    said = entry_point(model)
    ours = Captured(capture(before), capture(model, name="package"), capture(after))
    sides: dict[str, Call] = {
        PACKAGE: plain, OURS: ours.alone, CHAIN: lambda x: after(plain(before(x))), OUR_CHAIN: ours.chain,
    }  # fmt: skip
    beside: dict[str, Call] = {COMPILED: torch.compile(block), REDUCE_OVERHEAD: _reduced(block)}
    for name, call in beside.items():
        _several(call, inputs[ALONE], SEEDS)
        _done(f"{name} at batch {ALONE}")
    for given in inputs.values():
        for call in sides.values():
            _several(call, given, SEEDS)
    wrong = _differences(sides, inputs, "at first")
    _done("compared")

    def timed() -> Result:
        us = {batch: _times(sides | beside if batch == ALONE else sides, inputs[batch], setting) for batch in BATCHES}
        wrong.extend(_differences(sides, inputs, "in the end"))
        counts, idle = _counts({"before": ours.first, f"package, {said}": ours.model, "after": ours.second})
        return {"us": us, "wrong": [*wrong, *idle], "counts": counts}

    return timed


def _counts(asked: dict[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    """What each function of the chain did, and which were never replayed."""
    counts, idle = [], []
    for name, function in asked.items():
        counted = recordings(function)
        text = f"{counted.recordings} recordings, {counted.replays} replays, {counted.eager_calls} eager calls"
        counts.append((name, text))
        if not counted.replays:
            idle.append(f"{name}: never replayed: {'; '.join(f'{f.code} {f.what}' for f in counted.findings)}")
    return counts, idle


def _loaded_twice(block: Block, example: Tensor) -> list[Any]:
    """The package loaded twice, of which one copy is not captured."""
    path = str(Path(os.environ["TMPDIR"]) / "block.pt2")
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(block, (example,), dynamic_shapes=shapes)
    _done("exported")
    # Compiled headers pay off from the second package on.
    with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    _done("packaged")
    loaded = [torch._inductor.aoti_load_package(path, run_single_threaded=True) for _ in range(2)]
    _done("loaded")
    return loaded


def _done(what: str) -> None:
    print(f"{what} after {time.monotonic() - IMPORTED:.0f} s", flush=True)


def _reduced(block: Block) -> Call:
    compiled = torch.compile(block, mode="reduce-overhead")

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        y: Tensor = compiled(x)
        return y

    return call


def _differences(sides: dict[str, Call], inputs: dict[int, list[Tensor]], when: str) -> list[str]:
    """Where results differ: each shape until it is replayed, and results that are kept while others are computed."""
    wrong = []
    for ours, theirs in ((OURS, PACKAGE), (OUR_CHAIN, CHAIN)):
        pairs = []
        for number in range(4 * SEEDS):
            for batch, given in inputs.items():
                x = given[number % SEEDS]
                pairs.append((batch, sides[ours](x), sides[theirs](x)))
        bad = sorted({batch for batch, result, expected in pairs if not torch.equal(result, expected)})
        wrong += [f"{ours}, batch {batch}: not what the package gives {when}" for batch in bad]
    return wrong


def _times(sides: dict[str, Call], inputs: list[Tensor], setting: Setting) -> dict[str, list[float]]:
    """Microseconds a call from an idle device to an idle device, rounds in turn."""
    calls = setting.pick(CALLS, 4)
    times: dict[str, list[float]] = {name: [] for name in sides}

    for call in sides.values():
        _several(call, inputs, 2 * SEEDS)
    with undisturbed():
        for number in range(setting.pick(ROUNDS, 2)):
            for name in list(sides) if number % 2 == 0 else reversed(sides):
                call = sides[name]
                times[name].append(wall_ms(lambda call=call: _several(call, inputs, calls), setting) * 1e3 / calls)  # type: ignore[misc]
    return times


def _several(call: Call, inputs: list[Tensor], count: int) -> None:
    for number in range(count):
        call(inputs[number % SEEDS])
