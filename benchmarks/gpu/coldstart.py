"""Cold start: fresh processes until the first right token, with an empty plan cache and with a warm one.

``python -m benchmarks.gpu.coldstart CHILD DEVICE [tiny]`` is one such process; it prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import nets
from benchmarks.gpu.setting import Outcome, Setting
from benchmarks.replay import WIDTH, EncoderLayer
from benchmarks.timing import Figure
from capture import CaptureWarning, capture, mark_step_begin, recordings

ROOT = Path(__file__).resolve().parents[2]
LENGTH, TOKENS, SHAPES = 2048, 6, 64
Child = dict[str, Any]


def measure(setting: Setting) -> Outcome:
    """Seconds to the first token and to the first replayed token, and to record 64 shapes; medians over processes."""
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm"
        _child("llama", setting, warm)
        children: dict[str, list[Child]] = {"eager": [], "cold": [], "warm": []}
        for number in range(setting.processes):
            children["eager"].append(_child("eager", setting, None))
            children["cold"].append(_child("llama", setting, Path(folder) / f"cold{number}"))
            children["warm"].append(_child("llama", setting, warm))
        _child("shapes", setting, warm)
        shapes = [_child("shapes", setting, warm) for _ in range(setting.processes)]
    wrong = _mistakes(children, shapes, setting)
    rows: list[tuple[str, ...]] = [("process", "plans loaded", "observations", "recordings", "eager calls", "tokens")]
    rows += [
        (name, *(str(child.get(part, "")) for part in ("plans_loaded", "observations", "recordings", "eager_calls")),
         str(child.get("tokens", "")))
        for name, child in [*((name, runs[-1]) for name, runs in children.items()), ("64 shapes, warm", shapes[-1])]
    ]  # fmt: skip
    return Outcome(
        figures=_figures(children, shapes), rows=tuple(rows), wrong=tuple(wrong),
        details={**children, "shapes": shapes},
    )  # fmt: skip


def _figures(children: dict[str, list[Child]], shapes: Sequence[Child]) -> tuple[Figure, ...]:
    def seconds(side: str, part: str) -> tuple[float, ...]:
        return tuple(float(child[part]) for child in children[side])

    figures = [
        Figure(name=f"first token, {name}", unit="s", values=seconds(side, "first"))
        for name, side in (("eager", "eager"), ("empty plan cache", "cold"), ("warm plan cache", "warm"))
    ]
    figures += [
        Figure(name=f"first replayed token, {name}", unit="s", values=seconds(side, "replayed"))
        for name, side in (("empty plan cache", "cold"), ("warm plan cache", "warm"))
    ]
    for part, name, bar in (("first", "first token", 0.5), ("replayed", "first replayed token", None)):
        cold = statistics.median(seconds("cold", part))
        values = tuple(value / cold for value in seconds("warm", part))
        figures.append(Figure(name=f"{name}, warm", unit="/ median of empty cache", values=values, bar=bar))
    took = tuple(float(child["seconds"]) for child in shapes)
    figures.append(
        Figure(name=f"{shapes[0]['shapes']} shapes from a warm cache", unit="s in all", values=took, bar=1.2)
    )
    return tuple(figures)


def _mistakes(children: dict[str, list[Child]], shapes: Sequence[Child], setting: Setting) -> list[str]:
    expected = children["eager"][0]["tokens"]
    wrong = [
        f"coldstart: {name} process {number} decodes {child['tokens']}, eager {expected}"
        for name, runs in children.items()
        for number, child in enumerate(runs)
        if child["tokens"] != expected
    ]
    wrong += [f"coldstart: a warm process took no plan from the cache: {child}"
              for child in children["warm"] if not child["plans_loaded"] or child["observations"]]  # fmt: skip
    wrong += [f"coldstart: 64 shapes: {child}" for child in shapes
              if child["recordings"] != setting.pick(SHAPES, 4)
              or child["differ"] or child["observations"]]  # fmt: skip
    return wrong


def _child(kind: str, setting: Setting, cache: Path | None) -> Child:
    """Run one process and read its last line. Raises ``RuntimeError`` with the end of its errors."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environment = {**os.environ, "CAPTURE_CACHE": "0" if cache is None else "1", "PYTHONPATH": path}
    if cache is not None:
        environment["CAPTURE_CACHE_DIR"] = str(cache)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled bytecode is used, as with an installed package
    command = [sys.executable, "-m", "benchmarks.gpu.coldstart", kind, setting.device, *(["tiny"] * setting.tiny)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])} failed:\n{done.stderr[-2000:]}")
    answer: Child = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


# ------------------------------------------------------------------------------------------------ inside the process


def child(kind: str, setting: Setting) -> Child:
    """What one fresh process measures."""
    warnings.simplefilter("ignore", CaptureWarning)
    with torch.no_grad():
        return _shapes(setting) if kind == "shapes" else _llama(setting, captured=kind == "llama")


def _llama(setting: Setting, *, captured: bool) -> Child:
    """Time a Llama-shaped model. When the clock starts only weights and the empty cache were made on the device."""
    model = nets.llama(setting)
    cache = nets.static_cache(model, setting.pick(LENGTH, 64), setting)
    step = nets.token_step(model, cache)
    call = capture(step) if captured else step
    ids = torch.ones(1, 1, dtype=torch.int64, device=setting.device)
    setting.synchronize()
    answer: Child = {}
    tokens: list[int] = []
    begin = time.perf_counter()
    for _ in range(TOKENS):
        mark_step_begin()
        ids = call(ids).clone()
        tokens.append(int(ids))
        answer.setdefault("first", time.perf_counter() - begin)
        if captured and "replayed" not in answer and recordings(call).replays:
            answer["replayed"] = time.perf_counter() - begin
    answer.setdefault("replayed", time.perf_counter() - begin)
    return {**answer, "tokens": tokens, **(_totals(call) if captured else {})}


def _totals(call: Callable[..., Any]) -> Child:
    totals = recordings(call)
    return {name: getattr(totals, name) for name in ("plans_loaded", "observations", "recordings", "eager_calls")}


def _shapes(setting: Setting) -> Child:
    """Sequence lengths 64 to 1 of a small transformer, each called until it is recorded."""
    torch.manual_seed(0)
    shapes = setting.pick(SHAPES, 4)
    with torch.device(setting.device):
        body = nn.Sequential(*[EncoderLayer() for _ in range(4)]).eval()
        inputs = [torch.randn(1, length, WIDTH) for length in range(shapes, 0, -1)]

    def encode(x: Tensor) -> Tensor:
        hidden: Tensor = body(x)
        return hidden

    encoded = capture(encode, max_recordings=shapes)
    setting.synchronize()
    begin = time.perf_counter()
    for number, x in enumerate(inputs):
        calls = 0
        while recordings(encoded).recordings <= number and calls < 3:
            mark_step_begin()
            encoded(x)
            calls += 1
    setting.synchronize()
    seconds = time.perf_counter() - begin
    differ = 0
    for x in inputs:
        mark_step_begin()
        differ += not torch.equal(encoded(x), encode(x))
    return {"seconds": seconds, "shapes": shapes, "differ": differ, **_totals(encoded)}


if __name__ == "__main__":
    sizes = Setting(device=sys.argv[2], tiny="tiny" in sys.argv[3:])
    if not sizes.on_gpu:
        torch.set_num_threads(1)
    print(json.dumps(child(sys.argv[1], sizes)))
