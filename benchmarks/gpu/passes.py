"""A forward pass or a training step of one model in several ways: equal bit for bit, memory, times, a row each."""

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
LEAST = 20  # models in a mean, where as many were asked for
LATE = ("no time was left", "in time")  # ends of what is said of jobs that the time did not suffice for
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
    """By seed, digests of what ``plain`` gave when it was compared first."""

    def step(self, call: Callable[..., Tensor], model: nn.Module) -> Step:
        """The pass. ``call``: gives logits by the weights of ``model``."""
        return forward(call, self.inputs) if self.kind == FORWARD else training(call, model, self.inputs)

    def warm(self, name: str, side: Side) -> None:
        """Take a side in. Its memory: what it adds to this process, in which other models have run before."""
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
        """Compare these with ``plain``, tensor by tensor. What differs in two runs of ``plain`` only has to be near.

        Inductor has one kernel object for equal sources of a process, and looks for its fastest configuration again
        where another model has it compiled: what ``plain`` gave at first is right, too.
        """
        steady: dict[int, bool] = {}
        same: dict[tuple[str, int], bool] = {}
        far: dict[tuple[str, int], bool] = {}
        for seed in range(SEEDS):
            expected, again = (self.sides[self.plain].kept(seed) for _ in range(2))
            for index, (one, other) in enumerate(zip(expected, again, strict=True)):
                steady[index] = steady.get(index, True) and torch.equal(one, other)
            if seed not in self.first:
                self.first[seed] = list(map(_digest, expected))
            for name in among:
                found = self.sides[name].kept(seed)
                if len(found) != len(expected):
                    self.wrong.setdefault(name, f"{len(found)} tensors, not {len(expected)} {when}")
                for index, (one, other) in enumerate(zip(found, expected, strict=False)):
                    equal = torch.equal(one, other) or _digest(one) == self.first[seed][index]
                    same[name, index] = same.get((name, index), True) and equal
                    far[name, index] = far.get((name, index), False) or not _near(one, other)
                self.sides[name].drop()
        self.varying = max(self.varying, sum(not one for one in steady.values()))
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
        """Plain values."""
        counted = {name: [recordings(one) for one in side.captured()] for name, side in self.sides.items()}
        findings = [one for totals in counted.values() for found in totals for one in found.findings]
        reasons = {one.code: f"{one.code} {one.what}" for one in reversed(findings) if one.severity >= Severity.EAGER}
        return {
            **{part: {name: sum(getattr(one, part) for one in totals) for name, totals in counted.items() if totals}
               for part in ("recordings", "replays", "eager_calls")},
            "why": "; ".join(sorted(reasons.values())), "skips": self.skips, "varying": self.varying,
            "wrong": self.wrong, "ms": {name: side.times for name, side in self.sides.items() if side.times},
            "MiB": {name: round(side.nbytes / 2**20, 1) for name, side in self.sides.items()},
        }  # fmt: skip


def _digest(tensor: Tensor) -> int:
    """Follows from the bits and their places."""
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
    """Those that there are."""
    return [one.grad for one in parameters if one.grad is not None]


def skipped() -> int:
    """How often torch's trees left out a recording since its counters were cleared."""
    return sum(
        count for name, count in torch._dynamo.utils.counters["inductor"].items() if "cudagraph_skip" in name
    )  # fmt: skip


def contest(job: Job, setting: Setting, plain: str) -> Contest:
    """The job's model and inputs, no side yet."""
    # Many models share the code that a decorator of transformers puts around each, and are compiled for several
    # backends.
    dynamo: Any = torch._dynamo
    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = 4096
    dynamo.utils.counters.clear()
    torch.backends.cudnn.deterministic = True
    logging.getLogger("torch").setLevel(logging.ERROR)  # the table counts what is skipped
    name, kind = job
    net = next(one for one in NETS if one.name == name)
    inputs = [net.inputs(setting, seed) for seed in range(SEEDS)]
    return Contest(setting=setting, model=net.build(setting), kind=kind, inputs=inputs, plain=plain)


def limits(seconds: float, workers: int) -> Limits:
    """For a run that takes at most so long: the last quarter is for measurements, and what was begun last has a fifth
    of it to get ready."""
    return Limits(workers=workers, begun_s=0.55 * seconds, ready_s=0.2 * seconds, measured_s=0.25 * seconds)


def jobs_of(names: Sequence[str]) -> list[Job]:
    """The longest first."""
    return [(name, kind) for kind in (TRAINING, FORWARD) for name in names]


@frozen(kw_only=True)
class Table:
    """How results are shown: ``timed`` names the columns of milliseconds."""

    jobs: Sequence[Job]
    timed: Sequence[str]
    ours: Sequence[str]
    """The first is compared with ``theirs``."""
    theirs: str
    bar: float

    def outcome(self, results: dict[Job, Result], failed: dict[Job, str]) -> Outcome:
        """A row a model and pass, in the order of the models, and geometric means."""
        order = sorted(self.jobs, key=lambda job: ([one.name for one in NETS].index(job[0]), job[1]))
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
        """A mean of few models says little."""
        asked = {job[0] for job in self.jobs}
        whole = asked - {job[0] for job in self.jobs if job not in results}
        least = min(LEAST, len(asked))
        return [f"{len(whole)} models measured, not {least}"] if len(whole) < least else []

    def _row(self, job: Job, one: Result) -> tuple[str, ...]:
        ms = {name: f"{statistics.median(times):.3f}" for name, times in one["ms"].items()}
        said = "; ".join(f"{name}: {text}" for name, text in one["wrong"].items()) or "yes"
        vary = f" ({one['varying']} vary without recordings)" if one["varying"] else ""
        counts = [", ".join(map(str, one[part].values())) for part in ("recordings", "eager_calls")]
        return (
            *job, said + vary, *counts, str(one["skips"]), *[ms.get(name, "") for name in self.timed],
            f"{self._ratio(one, self.ours[0]):.3f}",
            *[f"{one['MiB'][name]:.0f}" for name in (self.theirs, self.ours[0])], one["why"],
        )  # fmt: skip

    def _ratio(self, one: Result, name: str) -> float:
        """The median over rounds."""
        times: dict[str, list[float]] = one["ms"]
        return statistics.median(a / b for a, b in zip(times[name], times[self.theirs], strict=True))

    def _mistakes(self, job: Job, one: Result) -> list[str]:
        found = [f"{name}: {one['wrong'][name]}" for name in self.ours if name in one["wrong"]]
        found += [f"{name}: never replayed: {one['why']}" for name, count in one["replays"].items() if not count]
        return [f"{', '.join(job)}: {text}" for text in found]

    def _means(self, name: str, kind: str, results: dict[Job, Result]) -> list[Figure]:
        """The geometric mean, and how many models are in it."""
        chosen = [one for job, one in results.items() if kind in (ALL, job[1]) and name in one["ms"]]
        if not chosen or (kind == ALL and name != self.ours[0]):
            return []
        ratios = [self._ratio(one, name) for one in chosen]
        value = math.exp(statistics.fmean(map(math.log, ratios)))
        bar = self.bar if kind == ALL else None
        found = [Figure(name=f"{name}, {kind}", unit=f"/ {self.theirs}, geometric mean", values=(value,), bar=bar,
                        detail=f"{len(ratios)} models and passes, {min(ratios):.2f} to {max(ratios):.2f}")]  # fmt: skip
        ours, theirs = (sum(one["MiB"][side] for one in chosen) for side in (name, self.theirs))
        if kind == ALL and theirs > 0:
            detail = f"{ours:.0f} and {theirs:.0f} MiB"
            unit = f"/ {self.theirs}, sums"
            found.append(Figure(name=f"{name}, memory", unit=unit, values=(ours / theirs,), detail=detail))
        return found
