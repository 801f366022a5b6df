"""The models of ``compiled`` with Inductor's kernels: ours around the compiled code, beside ``mode="reduce-overhead"``,
forward passes and training steps, and each bit for bit what the same compiled code gives without recordings."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from benchmarks.gpu import fleet, passes
from benchmarks.gpu.fleet import Job, Limits, Measure, Result
from benchmarks.gpu.passes import FORWARD, Contest, Inputs, Side, Step, Table
from benchmarks.gpu.setting import Outcome, Setting
from benchmarks.gpu.zoo import NETS
from capture import capture, mark_step_begin

PLAIN, THEIRS = "torch.compile", 'mode="reduce-overhead"'
OURS, WHOLE = "ours", "ours, whole step"
BAR = 1.00
TINY = ("BERT", "Llama", "ResNet")  # a C++ compiler makes the kernels on the CPU, a minute a model


def measure(setting: Setting) -> Outcome:
    """A row a model and pass; the geometric means of all."""
    jobs = passes.jobs_of(setting.pick(tuple(net.name for net in NETS), TINY))
    limits = setting.pick(Limits(workers=12, begun_s=330, measured_s=170),
                          Limits(workers=2, begun_s=1200, measured_s=300))  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # nothing was compiled before
        results, failed = fleet.run(
            prepare, jobs, setting, limits, CUBLAS_WORKSPACE_CONFIG=":4096:8", TORCHINDUCTOR_CACHE_DIR=folder,
            TORCHINDUCTOR_COMPILE_THREADS="1",
        )  # fmt: skip
    table = Table(jobs=jobs, timed=(PLAIN, THEIRS, OURS, WHOLE), ours=(OURS, WHOLE), theirs=THEIRS, bar=BAR)
    outcome = table.outcome(results, failed)
    if setting.on_gpu:
        return outcome
    # The CPU engine holds operators, and Inductor's kernels are none.
    return evolve(outcome, wrong=tuple(one for one in outcome.wrong if "never replayed" not in one))


def prepare(job: Job, setting: Setting) -> Measure:
    """Compile and compare. Ours run on the weights and the code of ``PLAIN``; ``THEIRS`` on a copy."""
    passes.set_up()
    name, kind = job
    net = passes.net(name)
    model = net.build(setting)
    inputs = [net.inputs(setting, seed) for seed in range(passes.SEEDS)]
    torch._dynamo.utils.counters.clear()
    contest = Contest(setting, {}, PLAIN)
    twin, compiled = copy.deepcopy(model), torch.compile(_logits(model))
    names = [PLAIN, THEIRS, OURS]
    with _undonated():
        contest.warm(PLAIN, Side(model, _step(compiled, model, kind, inputs)))
        ours = capture(_named(compiled), name=f"{name} {kind}")
        contest.warm(OURS, Side(model, _step(ours, model, kind, inputs), mark_step_begin, lambda: (ours,)))
        if kind != FORWARD:
            contest.warm(WHOLE, _whole(compiled, model, inputs, name))
            names.append(WHOLE)
    theirs = torch.compile(_logits(twin), mode="reduce-overhead")
    contest.warm(THEIRS, Side(twin, _step(theirs, twin, kind, inputs), torch.compiler.cudagraph_mark_step_begin))
    contest.skips = passes.skipped()
    contest.check(names[1:], "at first")

    def timed() -> Result:
        contest.time(names)
        contest.check(names[1:], "in the end")
        return contest.result()

    return timed


def _logits(model: nn.Module) -> Callable[..., Tensor]:
    """What is compiled: the other results of a model (caches, states) are nobody's here."""

    def call(**given: Tensor) -> Tensor:
        logits: Tensor = model(**given).logits
        return logits

    return call


def _named(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of its own around compiled code."""

    def call(**given: Tensor) -> Tensor:
        return compiled(**given)

    return call


def _undonated() -> contextlib.AbstractContextManager[Any]:
    """A backward pass that is recorded apart keeps its graph, which one compiled with donated buffers refuses. Ours is
    compiled once more while it is watched: Dynamo guards the autocast cache, which is off then."""
    functorch: Any = torch._functorch
    found: contextlib.AbstractContextManager[Any] = functorch.config.patch(donated_buffer=False)
    return found


def _step(call: Callable[..., Tensor], model: nn.Module, kind: str, inputs: Inputs) -> Step:
    return passes.forward(call, inputs) if kind == FORWARD else passes.training(call, model, inputs)


def _whole(compiled: Callable[..., Tensor], model: nn.Module, inputs: Inputs, name: str) -> Side:
    """Loss and backward pass in the recording, too."""
    parameters = list(model.parameters())
    whole = capture(lambda **given: passes.backward(compiled, parameters, given), name=f"{name} whole step")

    def step(seed: int) -> list[Tensor]:
        with torch.enable_grad():
            return [whole(**inputs[seed]), *passes.gradients(parameters)]

    return Side(model, step, mark_step_begin, lambda: (whole,))
