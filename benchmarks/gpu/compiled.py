"""More than twenty real models through ``torch.compile``: our backend beside ``backend="cudagraphs"``, forward passes
and training steps, in one run, and each bit for bit what the same graphs give without recordings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import fleet, passes
from benchmarks.gpu.fleet import Job, Limits, Measure, Result
from benchmarks.gpu.passes import FORWARD, Contest, Inputs, Side, Step, Table
from benchmarks.gpu.setting import Outcome, Setting
from benchmarks.gpu.zoo import NETS
from capture import mark_step_begin
from capture.integrations.compile import backend, graphs

EAGER, PLAIN, THEIRS, OURS = "eager", "aot_eager", 'backend="cudagraphs"', "ours"
BAR = 0.95


def measure(setting: Setting) -> Outcome:
    """A row a model and pass; the geometric means of all."""
    jobs = passes.jobs_of([net.name for net in NETS])
    limits = setting.pick(Limits(workers=10, begun_s=280, measured_s=200),
                          Limits(workers=2, begun_s=3000, measured_s=300))  # fmt: skip
    results, failed = fleet.run(prepare, jobs, setting, limits, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    return Table(jobs=jobs, timed=(EAGER, THEIRS, OURS), ours=(OURS,), theirs=THEIRS, bar=BAR).outcome(results, failed)


def prepare(job: Job, setting: Setting) -> Measure:
    """Compile and compare. Eager runs on the weights of ``PLAIN``, the others on copies."""
    passes.set_up()
    name, kind = job
    net = passes.net(name)
    model = net.build(setting)
    inputs = [net.inputs(setting, seed) for seed in range(passes.SEEDS)]
    torch._dynamo.utils.counters.clear()
    contest = Contest(setting, {}, PLAIN)
    contest.warm(EAGER, Side(model, _step(model, model, kind, inputs)))
    contest.warm(PLAIN, Side(model, _step(torch.compile(model, backend="aot_eager"), model, kind, inputs)))
    twins = copy.deepcopy(model), copy.deepcopy(model)
    theirs = _step(torch.compile(twins[0], backend="cudagraphs"), twins[0], kind, inputs)
    contest.warm(THEIRS, Side(twins[0], theirs, torch.compiler.cudagraph_mark_step_begin))
    known = set(map(id, graphs()))
    ours = _step(torch.compile(twins[1], backend=backend), twins[1], kind, inputs)
    contest.warm(OURS, Side(twins[1], ours, mark_step_begin))
    made = [graph for graph in graphs() if id(graph) not in known]
    contest.sides[OURS].captured = lambda: made
    contest.check((THEIRS, OURS), "at first")
    contest.skips = passes.skipped()

    def timed() -> Result:
        contest.time((EAGER, THEIRS, OURS))
        contest.check((THEIRS, OURS), "in the end")
        return contest.result()

    return timed


def _step(compiled: Callable[..., Any], model: nn.Module, kind: str, inputs: Inputs) -> Step:
    def call(**given: Tensor) -> Tensor:
        logits: Tensor = compiled(**given).logits
        return logits

    return passes.forward(call, inputs) if kind == FORWARD else passes.training(call, model, inputs)
