"""The models of ``compiled`` with Inductor's kernels: ours around the compiled code, beside ``mode="reduce-overhead"``,
forward passes and training steps, and each bit for bit what the same compiled code gives without recordings."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor, nn

from benchmarks.gpu import fleet, passes
from benchmarks.gpu.fleet import Job, Measure
from benchmarks.gpu.passes import FORWARD, TRAINING, Contest, Side, Table
from benchmarks.gpu.setting import Outcome, Setting
from benchmarks.gpu.zoo import NETS
from capture import capture, mark_step_begin

PLAIN, THEIRS = "torch.compile", 'mode="reduce-overhead"'
OURS, WHOLE = "ours", "ours, whole step"
BAR = 1.00
SLOW = ("ResNet", "ConvNeXt", "BART", "T5")  # these have more kernels than others, and several graphs
LONGEST = (("T5", TRAINING), ("BART", TRAINING))
TINY = ("BERT", "Llama", "ResNet")  # a C++ compiler makes the kernels on the CPU, a minute a model


def measure(setting: Setting) -> Outcome:
    """A row a model and pass; the geometric means of all."""
    names = setting.pick(tuple(net.name for net in NETS), TINY)
    jobs = sorted([(name, kind) for name in names for kind in (TRAINING, FORWARD)], key=_place)
    limits = passes.limits(setting.seconds(510, 3000), setting.pick(16, 2))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # an empty cache of compiled code
        results, failed = fleet.run(
            prepare, jobs, setting, limits, CUBLAS_WORKSPACE_CONFIG=":4096:8", BENCHMARK_FOLDER=folder,
            TRITON_CACHE_DIR=str(Path(folder) / "triton"), TORCHINDUCTOR_COMPILE_THREADS="1",
        )  # fmt: skip
    table = Table(jobs=jobs, timed=(PLAIN, THEIRS, OURS, WHOLE), ours=(OURS, WHOLE), theirs=THEIRS, bar=BAR)
    outcome = table.outcome(results, failed)
    if setting.on_gpu:
        return outcome
    # The CPU engine records operators, and Inductor's kernels are no operators.
    return evolve(outcome, wrong=tuple(text for text in outcome.wrong if "never replayed" not in text))


def _place(job: Job) -> tuple[bool, int]:
    """The order of jobs: the slowest to compile first, so that nobody waits for them in the end, then the fastest. If
    the slowest are late, their processes have prepared nothing else that would be lost."""
    return job not in LONGEST, SLOW.index(job[0]) if job[0] in SLOW else -1


def prepare(job: Job, setting: Setting) -> Measure:
    """Compile and compare. Ours run on the weights and the code of ``PLAIN``; ``THEIRS`` on a copy.

    Torch's cache of graphs has the mode in its key, but both modes have the same Triton sources, and in one process
    equal sources are one kernel object. The second compilation makes it search for its fastest configuration again, so
    ours is recorded after it. Each job has its own cache folder, as jobs with equal kernels would do the same to each
    other.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["BENCHMARK_FOLDER"]) / "-".join(job))
    contest = passes.contest(job, setting, PLAIN)
    model, (name, kind) = contest.model, job
    twin, compiled = copy.deepcopy(model), torch.compile(_logits(model))
    contest.warm(PLAIN, Side(model, contest.step(compiled, model)))
    theirs = torch.compile(_logits(twin), mode="reduce-overhead")
    contest.warm(THEIRS, Side(twin, contest.step(theirs, twin), torch.compiler.cudagraph_mark_step_begin))
    ours = capture(_named(compiled), name=f"{name} {kind}")
    contest.warm(OURS, Side(model, contest.step(ours, model), mark_step_begin, lambda: (ours,)))
    if kind == TRAINING:
        contest.warm(WHOLE, _whole(compiled, contest, f"{name} whole step"))
    names = list(contest.sides)
    return contest.ready(names, names[1:])


def _logits(model: nn.Module) -> Callable[..., Tensor]:
    """The compiled part: the logits alone, without the model's caches and states."""

    def call(**given: Tensor) -> Tensor:
        logits: Tensor = model(**given).logits
        return logits

    return call


def _named(compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A new function around compiled code."""

    def call(**given: Tensor) -> Tensor:
        return compiled(**given)

    return call


def _whole(compiled: Callable[..., Tensor], contest: Contest, name: str) -> Side:
    """A recording of forward pass, loss and backward pass."""
    parameters = list(contest.model.parameters())
    whole = capture(lambda **given: passes.backward(compiled, parameters, given), name=name)

    def step(seed: int) -> list[Tensor]:
        with torch.enable_grad():
            return [whole(**contest.inputs[seed]), *passes.gradients(parameters)]

    return Side(contest.model, step, mark_step_begin, lambda: (whole,))
