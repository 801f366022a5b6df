"""More than twenty real models through ``torch.compile``: our backend beside ``backend="cudagraphs"``, forward passes
and training steps, in one run, and each bit for bit what the same graphs give without recordings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import fleet, passes
from benchmarks.gpu.fleet import Job, Measure
from benchmarks.gpu.passes import Contest, Side, Step, Table
from benchmarks.gpu.setting import Outcome, Setting
from benchmarks.gpu.zoo import NETS
from capture import mark_step_begin
from capture.integrations.compile import backend, graphs

EAGER, PLAIN, THEIRS, OURS = "eager", "aot_eager", 'backend="cudagraphs"', "ours"
BAR = 0.95


def measure(setting: Setting) -> Outcome:
    """A row for each model and pass, and the geometric means of all."""
    jobs = passes.jobs_of([net.name for net in NETS])
    limits = passes.limits(setting.seconds(480, 4000), setting.pick(10, 2))
    results, failed = fleet.run(prepare, jobs, setting, limits, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    return Table(jobs=jobs, timed=(EAGER, THEIRS, OURS), ours=(OURS,), theirs=THEIRS, bar=BAR).outcome(results, failed)


def prepare(job: Job, setting: Setting) -> Measure:
    """Compile and compare. Eager runs on the weights of ``PLAIN``, the others on copies."""
    contest = passes.contest(job, setting, PLAIN)
    model = contest.model
    contest.warm(EAGER, Side(model, _step(contest, model, model)))
    contest.warm(PLAIN, Side(model, _step(contest, torch.compile(model, backend="aot_eager"), model)))
    twins = copy.deepcopy(model), copy.deepcopy(model)
    theirs = _step(contest, torch.compile(twins[0], backend="cudagraphs"), twins[0])
    contest.warm(THEIRS, Side(twins[0], theirs, torch.compiler.cudagraph_mark_step_begin))
    graphs_before = set(map(id, graphs()))
    ours = _step(contest, torch.compile(twins[1], backend=backend), twins[1])
    contest.warm(OURS, Side(twins[1], ours, mark_step_begin))
    made = [graph for graph in graphs() if id(graph) not in graphs_before]
    contest.sides[OURS].captured = lambda: made
    return contest.ready((EAGER, THEIRS, OURS), (THEIRS, OURS))


def _step(contest: Contest, compiled: Callable[..., Any], model: nn.Module) -> Step:
    def call(**given: Tensor) -> Tensor:
        logits: Tensor = compiled(**given).logits
        return logits

    return contest.step(call, model)
