"""A forward pass or a training step of one model in several ways, with a row each: equal bits, memory and times."""

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from benchmarks.gpu.fleet import Job, Limits, Measure, Result
from benchmarks.gpu.setting import Outcome, Setting, wall_ms
from benchmarks.gpu.zoo import NETS
from benchmarks.timing import Figure, undisturbed
from capture import CaptureWarning, Severity, recordings

WARM, SEEDS, ROUNDS, STEPS = 5, 4, 5, 10
LEAST = 20  # the fewest models in a mean, where as many were asked for
LATE = ("no time was left", "in time")  # how messages about jobs end for which there was no time
FORWARD, TRAINING, ALL = "forward", "training", "all"
Inputs = list[dict[str, Tensor]]
Step = Callable[[int], list[Tensor]]


@define(eq=False)
class Side:
    """One way to run a model. ``step``: of a seed, gives what has to be equal; ``mark`` begins a step."""

    model: nn.Module
    step: Step
    mark: Callable[[], object] = lambda: None
    captured: Callable[[], Sequence[Any]] = tuple
    """What ``recordings`` is asked about."""
    nbytes: int = 0
    times: list[float] = field(factory=list)

    def several(self, count: int) -> None:
        """Steps without their results."""
        for number in range(count):
            self.mark()
            self.step(number % SEEDS)

    def kept(self, seed: int) -> list[Tensor]:
        """A step's results, copied."""
        self.mark()
        return [one.clone() for one in self.step(seed)]

    def drop(self) -> None:
        """Leave no gradient behind."""
        for one in self.model.parameters():
            one.grad = None


@define(eq=False)
class Contest:
    """One model and pass, of these ``inputs``. ``plain``: the side whose results, where they are the same every time,
    the others have to give."""

    setting: Setting
    model: nn.Module
    kind: str
    inputs: Inputs
    plain: str
    sides: dict[str, Side] = field(factory=dict)
    skips: int = 0
    varying: int = 0
    wrong: dict[str, str] = field(factory=dict)
    first: dict[int, list[int]] = field(factory=dict)
    """By seed, digests of the values that ``plain`` gave at the first comparison."""

    def step(self, call: Callable[..., Tensor], model: nn.Module) -> Step:
        """The pass. ``call``: gives logits by the weights of ``model``."""
        return forward(call, self.inputs) if self.kind == FORWARD else training(call, model, self.inputs)

    def warm(self, name: str, side: Side) -> None:
        """Add a side and run it until it is recorded. Its memory is what it adds to this process, in which other models
        ran."""
        side.drop()
        before = self._reserved()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            side.several(WARM)
        side.nbytes = self._reserved() - before
        side.drop()
        self.sides[name] = side

    def _reserved(self) -> int:
        if not self.setting.on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def check(self, among: Sequence[str], when: str) -> None:
        """Compare these with ``plain``, tensor by tensor. A tensor that differs between two runs of ``plain`` has to be
        near.

        Inductor has one kernel object for equal sources in a process, and searches its fastest configuration again when
        another model compiles it: the values that ``plain`` gave at first are right, too.
        """
        steady: dict[int, bool] = {}
        same: dict[tuple[str, int], bool] = {}
        far: dict[tuple[str, int], bool] = {}
        for seed in range(SEEDS):
            expected, again = (self.sides[self.plain].kept(seed) for _ in range(2))
            for index, (tensor, right) in enumerate(zip(expected, again, strict=True)):
                steady[index] = steady.get(index, True) and torch.equal(tensor, right)
            if seed not in self.first:
                self.first[seed] = list(map(_digest, expected))
            for name in among:
                tensors = self.sides[name].kept(seed)
                if len(tensors) != len(expected):
                    self.wrong.setdefault(name, f"{len(tensors)} tensors, not {len(expected)} {when}")
                for index, (tensor, right) in enumerate(zip(tensors, expected, strict=False)):
                    equal = torch.equal(tensor, right) or _digest(tensor) == self.first[seed][index]
                    same[name, index] = same.get((name, index), True) and equal
                    far[name, index] = far.get((name, index), False) or not _near(tensor, right)
                self.sides[name].drop()
        self.varying = max(self.varying, sum(not is_steady for is_steady in steady.values()))
        for name in among:
            bad = [index for index in steady if not (same[name, index] if steady[index] else not far[name, index])]
            if bad:
                self.wrong.setdefault(name, f"{len(bad)} of {len(steady)} tensors differ {when}, first {bad[0]}")

    def time(self, names: Sequence[str]) -> None:
        """Wall milliseconds a step, rounds in turn. A step before each finds the compiled code of this model again."""
        steps = self.setting.pick(STEPS, 2)
        with undisturbed():
            for number in range(self.setting.pick(ROUNDS, 2)):
                for name in names if number % 2 == 0 else reversed(names):
                    side = self.sides[name]
                    side.several(1)
                    side.times.append(wall_ms(lambda side=side: side.several(steps), self.setting) / steps)  # type: ignore[misc]
                    side.drop()

    def ready(self, timed: Sequence[str], compared: Sequence[str]) -> Measure:
        """Compare, and once more after the times have been taken."""
        self.skips = skipped()
        self.check(compared, "at first")

        def measure() -> Result:
            self.time(timed)
            self.check(compared, "in the end")
            return self.result()

        return measure

    def result(self) -> Result:
        """The result as plain values."""
        counted = {name: [recordings(function) for function in side.captured()] for name, side in self.sides.items()}
        findings = [finding for totals in counted.values() for counts in totals for finding in counts.findings]
        reasons = {
            finding.code: f"{finding.code} {finding.what}"
            for finding in reversed(findings)
            if finding.severity >= Severity.EAGER
        }
        return {
            **{part: {name: sum(getattr(counts, part) for counts in totals)
                      for name, totals in counted.items() if totals}
               for part in ("recordings", "replays", "eager_calls")},
            "why": "; ".join(sorted(reasons.values())), "skips": self.skips, "varying": self.varying,
            "wrong": self.wrong, "ms": {name: side.times for name, side in self.sides.items() if side.times},
            "MiB": {name: round(side.nbytes / 2**20, 1) for name, side in self.sides.items()},
        }  # fmt: skip


def _digest(tensor: Tensor) -> int:
    """A number computed from the bits and their positions."""
    words = tensor.detach().contiguous().view(-1).view(torch.int32).long()
    return int((words * (2 * torch.arange(words.numel(), device=words.device) + 1)).sum())


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-4 * other.abs().max())


def forward(call: Callable[..., Tensor], inputs: Inputs) -> Step:
    """``call``: gives logits."""

    def step(seed: int) -> list[Tensor]:
        with torch.no_grad():
            return [call(**inputs[seed])]

    return step


def training(call: Callable[..., Tensor], model: nn.Module, inputs: Inputs) -> Step:
    """Loss and gradients, no optimizer."""
    parameters = list(model.parameters())

    def step(seed: int) -> list[Tensor]:
        with torch.enable_grad():
            return [backward(call, parameters, inputs[seed]), *gradients(parameters)]

    return step


def backward(call: Callable[..., Tensor], parameters: Sequence[Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """New gradients in the parameters; the loss."""
    for one in parameters:
        one.grad = None
    loss = call(**inputs).float().square().mean()
    loss.backward()
    return loss.detach()


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """All gradients that are not None."""
    return [one.grad for one in parameters if one.grad is not None]


def skipped() -> int:
    """How often torch's trees left out a recording since its counters were cleared."""
    return sum(
        count for name, count in torch._dynamo.utils.counters["inductor"].items() if "cudagraph_skip" in name
    )  # fmt: skip


def contest(job: Job, setting: Setting, plain: str) -> Contest:
    """The job's model and inputs, no side yet."""
    # Many models share the code of a decorator of transformers, and it is compiled for several backends.
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = 4096
    dynamo.utils.counters.clear()
    torch.backends.cudnn.deterministic = True
    logging.getLogger("torch").setLevel(logging.ERROR)  # no messages about skipped recordings: the table counts them
    name, kind = job
    net = next(candidate for candidate in NETS if candidate.name == name)
    inputs = [net.inputs(setting, seed) for seed in range(SEEDS)]
    return Contest(setting=setting, model=net.build(setting), kind=kind, inputs=inputs, plain=plain)


def limits(seconds: float, workers: int) -> Limits:
    """The limits of a run of so many seconds: the last quarter is for measurements, and jobs that were begun last have
    a fifth of the time to get ready."""
    return Limits(workers=workers, begun_s=0.55 * seconds, ready_s=0.2 * seconds, measured_s=0.25 * seconds)


def jobs_of(names: Sequence[str]) -> list[Job]:
    """The jobs, those that take longest first."""
    return [(name, kind) for kind in (TRAINING, FORWARD) for name in names]


@frozen(kw_only=True)
class Table:
    """How results are shown: ``timed`` names the columns of milliseconds."""

    jobs: Sequence[Job]
    timed: Sequence[str]
    ours: Sequence[str]
    """Our sides; the first is compared with ``theirs``."""
    theirs: str
    bar: float

    def outcome(self, results: dict[Job, Result], failed: dict[Job, str]) -> Outcome:
        """A row for each model and pass, in the order of the models, and geometric means."""
        order = sorted(self.jobs, key=lambda job: ([net.name for net in NETS].index(job[0]), job[1]))
        header = ("model", "pass", "equal", "recordings", "eager calls", f"skips of {self.theirs}",
                  *[f"ms {name}" for name in self.timed], "ratio", f"MiB {self.theirs}", "MiB ours", "why")  # fmt: skip
        rows: list[tuple[str, ...]] = [header]
        wrong: list[str] = []
        for job in order:
            if job in results:
                rows.append(self._row(job, results[job]))
                wrong += self._mistakes(job, results[job])
                continue
            why = failed.get(job, "never begun")
            late = why.endswith(LATE)
            rows.append((*job, "not measured" if late else "FAILED", *[""] * (len(header) - 4), why))
            wrong += [] if late else [f"{', '.join(job)}: {why}"]
        wrong += self._too_few(results)
        kinds = (FORWARD, TRAINING, ALL)
        figures = [figure for name in self.ours for kind in kinds for figure in self._means(name, kind, results)]
        details = {", ".join(job): results[job] for job in order if job in results}
        return Outcome(figures=tuple(figures), rows=tuple(rows), wrong=tuple(wrong), details=details)

    def _too_few(self, results: dict[Job, Result]) -> list[str]:
        """The mistake that too few models were measured, if so."""
        asked = {job[0] for job in self.jobs}
        whole = asked - {job[0] for job in self.jobs if job not in results}
        least = min(LEAST, len(asked))
        return [f"{len(whole)} models measured, not {least}"] if len(whole) < least else []

    def _row(self, job: Job, result: Result) -> tuple[str, ...]:
        ms = {name: f"{statistics.median(times):.3f}" for name, times in result["ms"].items()}
        said = "; ".join(f"{name}: {text}" for name, text in result["wrong"].items()) or "yes"
        vary = f" ({result['varying']} vary without recordings)" if result["varying"] else ""
        counts = [", ".join(map(str, result[part].values())) for part in ("recordings", "eager_calls")]
        return (
            *job, said + vary, *counts, str(result["skips"]), *[ms.get(name, "") for name in self.timed],
            f"{self._ratio(result, self.ours[0]):.3f}",
            *[f"{result['MiB'][name]:.0f}" for name in (self.theirs, self.ours[0])], result["why"],
        )  # fmt: skip

    def _ratio(self, one: Result, name: str) -> float:
        """The median ratio over rounds."""
        times: dict[str, list[float]] = one["ms"]
        return statistics.median(a / b for a, b in zip(times[name], times[self.theirs], strict=True))

    def _mistakes(self, job: Job, one: Result) -> list[str]:
        found = [f"{name}: {one['wrong'][name]}" for name in self.ours if name in one["wrong"]]
        found += [f"{name}: never replayed: {one['why']}" for name, count in one["replays"].items() if not count]
        return [f"{', '.join(job)}: {text}" for text in found]

    def _means(self, name: str, kind: str, results: dict[Job, Result]) -> list[Figure]:
        """The geometric mean, with the number of models in it."""
        chosen = [result for job, result in results.items() if kind in (ALL, job[1]) and name in result["ms"]]
        if not chosen or (kind == ALL and name != self.ours[0]):
            return []
        ratios = [self._ratio(result, name) for result in chosen]
        value = math.exp(statistics.fmean(map(math.log, ratios)))
        bar = self.bar if kind == ALL else None
        figures = [Figure(name=f"{name}, {kind}", unit=f"/ {self.theirs}, geometric mean", values=(value,), bar=bar,
                        detail=f"{len(ratios)} models and passes, {min(ratios):.2f} to {max(ratios):.2f}")]  # fmt: skip
        ours, theirs = (sum(result["MiB"][side] for result in chosen) for side in (name, self.theirs))
        if kind == ALL and theirs > 0:
            detail = f"{ours:.0f} and {theirs:.0f} MiB"
            unit = f"/ {self.theirs}, sums"
            figures.append(Figure(name=f"{name}, memory", unit=unit, values=(ours / theirs,), detail=detail))
        return figures
