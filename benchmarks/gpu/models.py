"""Real models, captured with no list of parameters: 50 steps each, bit for bit what eager gives."""

from __future__ import annotations

import statistics
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from benchmarks.gpu import nets
from benchmarks.gpu.setting import Outcome, Setting, last_lines, wall_ms
from benchmarks.timing import undisturbed
from capture import CaptureWarning, Severity, capture, config, mark_step_begin, recordings
from capture import reset as reset_captured

STEPS, ROUNDS, STEPS_A_ROUND = 50, 5, 20
HEADER = ("model", "equal", "recordings", "replays", "eager calls", "ms/step eager", "ms/step captured", "ratio", "why")


@define
class Run:
    """A model before its first step. ``call``: the captured function, or the eager one."""

    call: Callable[[Tensor], Tensor]
    following: Callable[[int, Tensor], Tensor]
    """Computes the next input from the step's number and output."""
    x: Tensor
    """The next input."""
    captured: Any = None
    """What ``recordings`` is asked about."""
    number: int = 0

    def advance(self) -> Tensor:
        """One step; gives its output."""
        mark_step_begin()
        output = self.call(self.x)
        self.x = self.following(self.number, output)
        self.number += 1
        return output

    def several(self, count: int) -> None:
        """Steps without their outputs."""
        for _ in range(count):
            self.advance()


@frozen
class Case:
    """``build`` makes the model once and gives a function that makes a run of it, captured or not."""

    name: str
    build: Callable[[Setting], Callable[[bool], Run]]
    why_eager: str = ""
    """Codes of which a finding must name one, for a model that cannot be recorded."""


def measure(setting: Setting) -> Outcome:
    """The table of models, and what was wrong."""
    rows: list[tuple[str, ...]] = [HEADER]
    wrong: list[str] = []
    for case in CASES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaptureWarning)  # the table says why
                row, mistakes = _proved(case, setting)
        except Exception as error:  # noqa: BLE001 - the other models still run
            print(f"{case.name}:\n" + "".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
            row, mistakes = (case.name, "FAILED", *[""] * (len(HEADER) - 3), last_lines(error)), [f"{case.name} failed"]
        reset_captured()
        if setting.on_gpu:
            torch.cuda.empty_cache()
        rows.append(row)
        wrong += mistakes
        print("  ".join(row), flush=True)
    return Outcome(rows=tuple(rows), wrong=tuple(wrong))


def _proved(case: Case, setting: Setting) -> tuple[tuple[str, ...], list[str]]:
    start = case.build(setting)
    steps = setting.pick(STEPS, 8)
    with config.patch(enabled=False):
        eager = start(False)
        expected = [eager.advance().clone() for _ in range(steps)]
        again = start(False)
        itself = _first_difference(expected, [again.advance().clone() for _ in range(steps)])
        del again
    run = start(True)
    differs = _first_difference(expected, [run.advance().clone() for _ in range(steps)])
    totals = recordings(run.captured)
    eager_ms, captured_ms = _timed(eager, run, setting)
    reasons = [
        f"{finding.code} {finding.name}: {finding.what}"
        for finding in totals.findings
        if finding.severity >= Severity.EAGER
    ]
    equal = "yes" if differs is None else f"NO, step {differs}"
    if itself is not None:
        equal += f" (eager differs from itself, step {itself})"
    mistakes = []
    if differs is not None and itself is None:
        mistakes.append(f"{case.name}: step {differs} is not what eager gives")
    if not totals.replays and not reasons:
        mistakes.append(f"{case.name}: never replayed, and no finding says why: {totals}")
    if not totals.replays and not any(reason[:5] in case.why_eager for reason in reasons):
        mistakes.append(f"{case.name}: runs eagerly, which it should not: {'; '.join(reasons)}")
    row = (
        case.name, equal, str(totals.recordings), str(totals.replays), str(totals.eager_calls),
        f"{eager_ms:.3f}", f"{captured_ms:.3f}", f"{captured_ms / eager_ms:.2f}", "; ".join(reasons),
    )  # fmt: skip
    return row, mistakes


def _first_difference(expected: list[Tensor], found: list[Tensor]) -> int | None:
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.dtype != other.dtype or not torch.equal(one, other):
            return number
    return None


def _timed(eager: Run, run: Run, setting: Setting) -> tuple[float, float]:
    """Wall milliseconds a step of both, medians of rounds in turn."""
    count = setting.pick(STEPS_A_ROUND, 2)
    times: list[tuple[float, float]] = []
    with undisturbed():
        for _ in range(setting.pick(ROUNDS, 2)):
            with config.patch(enabled=False):
                slow = wall_ms(lambda: eager.several(count), setting) / count
            times.append((slow, wall_ms(lambda: run.several(count), setting) / count))
    slow_ms, fast_ms = (statistics.median(side) for side in zip(*times, strict=True))
    return slow_ms, fast_ms


def _next_token(_: int, logits: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


def _decoded(model: Any, new_cache: Callable[[], Any], setting: Setting) -> Callable[[bool], Run]:
    """A step function over a model and its cache, both found by the closure."""

    def start(captured: bool) -> Run:
        step = nets.logits_step(model, new_cache())
        first = _next_token(0, step(nets.prompt(model, setting)))
        call = capture(step) if captured else step
        return Run(call, _next_token, first, call)

    return start


def _causal(make: Callable[[Setting], Any], length: int = 512) -> Callable[[Setting], Callable[[bool], Run]]:
    def build(setting: Setting) -> Callable[[bool], Run]:
        model = make(setting)
        return _decoded(model, lambda: nets.static_cache(model, setting.pick(length, 64), setting), setting)

    return build


def _gpt2_module(setting: Setting) -> Callable[[bool], Run]:
    """``capture(module)``: the cache is an argument, the result a ``ModelOutput`` that holds it."""
    model = nets.gpt2(setting)

    def start(captured: bool) -> Run:
        cache = nets.static_cache(model, setting.pick(512, 64), setting)
        first = _next_token(0, nets.logits_step(model, cache)(nets.prompt(model, setting)))
        if captured:
            capture(model)

        def call(ids: Tensor) -> Tensor:
            logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
            return logits[:, -1]

        return Run(call, _next_token, first, model)

    return start


def _mamba(setting: Setting) -> Callable[[bool], Run]:
    model = nets.mamba(setting)

    def start(captured: bool) -> Run:
        cache = nets.transformers().DynamicCache(config=model.config)

        def step(ids: Tensor) -> Tensor:
            logits: Tensor = model(ids, cache_params=cache, use_cache=True).logits
            return logits[:, -1]

        first = _next_token(0, step(nets.prompt(model, setting)))
        call = capture(step) if captured else step
        return Run(call, _next_token, first, call)

    return start


def _t5(setting: Setting) -> Callable[[bool], Run]:
    model = nets.t5(setting)
    package = nets.transformers()
    encoded = model.get_encoder()(nets.prompt(model, setting))

    def start(captured: bool) -> Run:
        cache = package.EncoderDecoderCache(
            package.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=setting.pick(256, 64)),
            package.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=nets.PROMPT),
        )

        def step(ids: Tensor) -> Tensor:
            out = model(encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=cache, use_cache=True)
            logits: Tensor = out.logits
            return logits[:, -1]

        begin = torch.zeros(1, 1, dtype=torch.int64, device=setting.device)
        first = _next_token(0, step(begin))  # this fills the cross-attention's cache
        call = capture(step) if captured else step
        return Run(call, _next_token, first, call)

    return start


def _seen(name: str, batch: int = 1) -> Callable[[Setting], Callable[[bool], Run]]:
    """``capture(module)`` of a vision model, a new random picture a step."""

    def build(setting: Setting) -> Callable[[bool], Run]:
        model = nets.vision(name, setting)
        pixels, steps = setting.pick(224, 32), setting.pick(STEPS, 8)
        generator = torch.Generator(setting.device).manual_seed(11)
        shape = (steps, batch, 3, pixels, pixels)
        pictures = list(torch.randn(shape, generator=generator, device=setting.device))

        def start(captured: bool) -> Run:
            call = capture(model) if captured else model
            return Run(call, lambda number, _: pictures[(number + 1) % steps], pictures[0], model)

        return start

    return build


def _mixture(experts: str) -> Callable[[Setting], Callable[[bool], Run]]:
    return _causal(lambda setting: nets.mixtral(setting, experts))


CASES = (
    Case("Llama 1B, step, bf16", _causal(nets.llama, 2048)),
    Case("GPT-2 small, step, fp32", _causal(nets.gpt2)),
    Case("GPT-2 small, capture(module)", _gpt2_module, why_eager="CG106"),  # the result holds the cache
    Case("Mamba 130M, step, bf16", _mamba),
    Case("T5 small, decoder step, fp32", _t5),
    Case("Mixtral-like, grouped experts", _mixture("grouped_mm")),
    Case("Mixtral-like, batched experts", _mixture("batched_mm")),
    Case("Mixtral-like, loop over experts", _mixture("eager"), why_eager="CG201 CG601"),
    Case("ResNet-50, capture(module)", _seen("resnet50")),
    Case("ViT-B/16, capture(module)", _seen("vit_b_16")),
)
