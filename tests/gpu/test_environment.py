"""Allocator settings, each in a process of its own, and the global switches of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capture import capture
from tests.gpu.support import DEVICE, ON_CUDA, counts, eager, healthy, may_fall_back, needs_cuda, needs_gpu, rand, same

pytestmark = needs_gpu

ROOT = Path(__file__).resolve().parents[2]

SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("native", {}),
    "expandable segments": ("native", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "cudaMallocAsync": ("cudaMallocAsync", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "no caching": ("native", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "small blocks": ("native", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:20,garbage_collection_threshold:0.5"}),
    "poisoned": ("native", {"CAPTURE_POISON": "1"}),
    "verified": ("native", {"CAPTURE_VERIFY": "always"}),
}
MUST_REPLAY = ("default", "expandable segments", "small blocks", "poisoned", "verified")


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The processes of all programs, started at once."""
    started = {}
    for name, (allocator, settings) in SETTINGS.items():
        command = [sys.executable, "-m", "tests.gpu.program", *([allocator] if ON_CUDA else [])]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "CAPTURE_VERIFY"))}
        started[name] = subprocess.Popen(
            command, cwd=ROOT, env={**clean, **settings}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    yield started
    for process in started.values():
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("name", SETTINGS)
def test_allocator_settings(name: str, programs: dict[str, subprocess.Popen[str]]) -> None:
    """A chain, branches and held results over a hundred steps are eager's, also after the functions died."""
    output, _ = programs[name].communicate(timeout=240)
    assert programs[name].returncode == 0, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("OK "), output
    if name in MUST_REPLAY:
        assert int(last.split()[1]) > 100, output


@may_fall_back
@pytest.mark.parametrize("benchmark", [False, True], ids=["heuristics", "benchmark"])
def test_row_167_convolutions(benchmark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cudnn.benchmark`` tries algorithms at the first call of each shape; the pool stays whole."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)).to(DEVICE)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(rand(*parameter.shape, seed=parameter.numel()))

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = net(x)
        return y, functional.conv2d(y, y[:1, :, :3, :3])

    held = []
    for i in range(10):
        x = rand(2, 3, 32 if i % 2 else 48, 32, seed=i)
        wanted = eager(f, x)
        held.append((f(x), wanted))
        same([result for result, _ in held], [expected for _, expected in held])
    healthy()


def set_switch(switch: str, on: bool) -> None:
    """Turn one switch of the matrix libraries."""
    if switch == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = on
    elif switch == "reduced":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = on
    elif switch == "deterministic":
        torch.use_deterministic_algorithms(on)
    else:
        torch.set_float32_matmul_precision("high" if on else "highest")


@pytest.mark.parametrize("switch", ["tf32", "deterministic", "precision", "reduced"])
def test_row_187_global_switches(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches that change which kernel runs are part of the key: each setting gives eager's values under it."""

    @capture
    def f(x: Tensor) -> Tensor:
        return x @ x.t()

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    dtype = torch.bfloat16 if switch == "reduced" else torch.float32
    at_start = switch == "reduced"
    try:
        for i in range(12):
            set_switch(switch, i // 3 % 2 == 0)
            x = rand(256, 512, seed=i, dtype=dtype)
            same(f(x), eager(f, x))
    finally:
        set_switch(switch, at_start)
    assert counts(f)[3] == 0


@needs_cuda
def test_row_187_autocast_on_the_device() -> None:
    """Under autocast a weight changed in place or replaced is cast anew, also within one block."""
    weight = nn.Parameter(rand(64, 64, seed=1))
    holder = {"weight": weight}

    @capture
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ holder["weight"], x * 2

    for i in range(8):
        x = rand(64, 64, seed=i)
        with torch.autocast("cuda", dtype=torch.bfloat16 if i % 4 else torch.float16):
            for _ in range(2):
                product, out = f(x)
                same((product, out), (x @ holder["weight"].detach().clone(), x * 2))
                same(out @ x, (x * 2) @ x)
                holder["weight"].mul_(-1.25)
        if i == 5:
            holder["weight"] = nn.Parameter(rand(64, 64, seed=9))
