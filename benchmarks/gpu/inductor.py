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
SLOW = ("ResNet", "ConvNeXt", "BART", "T5")  # more kernels than others, several graphs
LONGEST = (("T5", TRAINING), ("BART", TRAINING))
TINY = ("BERT", "Llama", "ResNet")  # a C++ compiler makes the kernels on the CPU, a minute a model


def measure(setting: Setting) -> Outcome:
    """A row a model and pass; the geometric means of all."""
    names = setting.pick(tuple(net.name for net in NETS), TINY)
    jobs = sorted([(name, kind) for name in names for kind in (TRAINING, FORWARD)], key=_place)
    limits = passes.limits(setting.seconds(510, 3000), setting.pick(16, 2))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # nothing was compiled before
        results, failed = fleet.run(
            prepare, jobs, setting, limits, CUBLAS_WORKSPACE_CONFIG=":4096:8", BENCHMARK_FOLDER=folder,
            TRITON_CACHE_DIR=str(Path(folder) / "triton"), TORCHINDUCTOR_COMPILE_THREADS="1",
        )  # fmt: skip
    table = Table(jobs=jobs, timed=(PLAIN, THEIRS, OURS, WHOLE), ours=(OURS, WHOLE), theirs=THEIRS, bar=BAR)
    outcome = table.outcome(results, failed)
    if setting.on_gpu:
        return outcome
    # The CPU engine holds operators, and Inductor's kernels are none.
    return evolve(outcome, wrong=tuple(one for one in outcome.wrong if "never replayed" not in one))


def _place(job: Job) -> tuple[bool, int]:
    """What is compiled fastest comes first, after the longest: nobody waits for those in the end, and should they not
    be ready in time, nothing else has been made ready by their processes."""
    return job not in LONGEST, SLOW.index(job[0]) if job[0] in SLOW else -1


def prepare(job: Job, setting: Setting) -> Measure:
    """Compile and compare. Ours run on the weights and the code of ``PLAIN``; ``THEIRS`` on a copy.

    Torch keys its cache of graphs by mode, but the Triton sources of both modes are the same, and in one process the
    same source is one kernel object, which is compiled once. The second compilation has it look for its fastest
    configuration anew, so ours are recorded after it. A folder a job, or other jobs with the same kernels would, too.
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


def _whole(compiled: Callable[..., Tensor], contest: Contest, name: str) -> Side:
    """Loss and backward pass in the recording, too."""
    parameters = list(contest.model.parameters())
    whole = capture(lambda **given: passes.backward(compiled, parameters, given), name=name)

    def step(seed: int) -> list[Tensor]:
        with torch.enable_grad():
            return [whole(**contest.inputs[seed]), *passes.gradients(parameters)]

    return Side(contest.model, step, mark_step_begin, lambda: (whole,))
