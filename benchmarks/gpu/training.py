"""A small GPT trains at a small batch: every mechanism in one run, rounds in turn, each on a twin of the model."""

from __future__ import annotations

import copy
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu.graphs import Hand, Hands
from benchmarks.gpu.setting import Outcome, Setting, deterministic, last_lines, ratio, wall_ms
from benchmarks.timing import Figure, undisturbed
from capture import capture, mark_step_begin, recordings
from capture import reset as reset_captured

BATCH, LENGTH, VOCABULARY, HEADS = 2, 64, 256, 4
WARM, ROUNDS, STEPS = 10, 7, 20
BACK = 2  # steps that bring a mechanism's gradients back to their places, after others used the same pool
EAGER, CUDAGRAPHS, REDUCE_OVERHEAD = "eager", 'compile(backend="cudagraphs")', 'compile(mode="reduce-overhead")'
GRAPHED, BY_HAND = "make_graphed_callables, a block each", "by hand: the whole step"
LEAST = "by hand: a block each, nothing saved or checked"
REGIONAL, WHOLE = "ours, a block each", "ours, the whole step"
ACCUMULATING = "ours, a block each, gradients accumulated in the graph"
OURS = (REGIONAL, ACCUMULATING, WHOLE)
SAME_KERNELS = (GRAPHED, BY_HAND, LEAST, *OURS)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input (batch x length x width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change


class GPT(nn.Module):
    """Tokens (batch x length) to logits (batch x length x vocabulary)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    @override
    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@define
class Trainer:
    """One mechanism with its own model and optimizer. ``step`` gives the loss, which the loop clones."""

    step: Callable[[Tensor], Tensor]
    captured: tuple[Any, ...] = ()
    losses: list[Tensor] = field(factory=list)
    number: int = 0
    peak: int = 0
    """Bytes beyond what there was before the mechanism was set up."""

    def train(self, data: list[Tensor], count: int) -> None:
        """Make ``count`` steps over the data, which repeats."""
        for _ in range(count):
            mark_step_begin()
            self.losses.append(self.step(data[self.number % len(data)]).clone())
            self.number += 1


def measure(setting: Setting) -> Outcome:
    """Milliseconds a step, memory, and whether the losses are eager's."""
    torch.manual_seed(0)
    start = GPT(width=setting.pick(256, 32), layers=setting.pick(8, 2)).to(setting.device)
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(VOCABULARY, (STEPS, BATCH, LENGTH + 1), generator=generator)
    # clones have equal alignment, as batches of a loader
    data = [window.clone() for window in windows.to(setting.device)]
    trainers: dict[str, Trainer] = {}
    failed: dict[str, str] = {}
    for name, build in MECHANISMS.items():
        try:
            with warnings.catch_warnings(), torch.enable_grad(), deterministic():
                warnings.simplefilter("ignore")  # CaptureWarning, and what has no deterministic kernel
                trainers[name] = _set_up(build, copy.deepcopy(start), data, setting)
        except Exception as error:  # noqa: BLE001 - the other mechanisms still run
            print(f"{name}:\n" + "".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
            failed[name] = last_lines(error)
    with warnings.catch_warnings(), torch.enable_grad(), deterministic():
        warnings.simplefilter("ignore")
        times = _rounds(trainers, data, setting)
    rows = [("mechanism", "ms/step", "steps/s", "peak MiB", "losses", "note")]
    expected = trainers[EAGER].losses
    for name in MECHANISMS:
        if name in failed:
            rows.append((name, "", "", "", "FAILED", failed[name]))
            continue
        ms = statistics.median(times[name])
        trainer = trainers[name]
        rows.append(
            (
                name,
                f"{ms:.3f}",
                f"{1e3 / ms:.0f}",
                f"{trainer.peak / 2**20:.1f}",
                _same(trainer, expected),
                _note(trainer),
            )
        )
    wrong = [f"{name} failed: {failed[name]}" for name in OURS if name in failed]
    wrong += [f"{n}: {_same(trainers[n], expected)}" for n in OURS
              if n in trainers and _first_difference(trainers[n], expected) is not None]  # fmt: skip
    outcome = Outcome(figures=_figures(times, trainers, setting), rows=tuple(rows), wrong=tuple(wrong))
    trainers.clear()
    reset_captured()
    return outcome


def _set_up(
    build: Callable[[GPT, Setting], Trainer], model: GPT, data: list[Tensor], setting: Setting
) -> Trainer:  # fmt: skip
    before = 0
    if setting.on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    trainer = build(model, setting)
    trainer.train(data, WARM)
    setting.synchronize()
    if setting.on_gpu:
        trainer.peak = torch.cuda.max_memory_allocated() - before
    print(f"set up in {time.perf_counter() - begin:.1f} s", flush=True)
    return trainer


def _rounds(trainers: dict[str, Trainer], data: list[Tensor], setting: Setting) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in trainers}
    names, count = list(trainers), setting.pick(STEPS, 3)
    with undisturbed():
        for number in range(setting.pick(ROUNDS, 2)):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                trainer = trainers[name]
                trainer.train(data, BACK)
                times[name].append(wall_ms(lambda trainer=trainer: trainer.train(data, count), setting) / count)  # type: ignore[misc]
    return times


def _figures(
    times: dict[str, list[float]], trainers: dict[str, Trainer], setting: Setting
) -> tuple[Figure, ...]:  # fmt: skip
    figures = [Figure(name=name, unit="ms a step", values=tuple(values)) for name, values in times.items()]
    for name, below, bar in (
        (WHOLE, BY_HAND, 1.02), (ACCUMULATING, GRAPHED, 0.90), (REGIONAL, GRAPHED, None), (REGIONAL, EAGER, 1.00),
        (LEAST, GRAPHED, None), (ACCUMULATING, LEAST, None),
    ):  # fmt: skip
        if name in times and below in times:
            figures.append(ratio(name, f"/ {below}", times[name], times[below], bar))
    if setting.on_gpu:
        for name in OURS:
            if name in trainers:
                stated = max((recordings(function).pool_bytes for function in trainers[name].captured), default=0)
                allowed = trainers[EAGER].peak * 1.05 + stated
                figures.append(Figure(name=f"peak memory, {name}", unit="/ (1.05 x eager's + recordings' bytes)",
                                      values=(trainers[name].peak / allowed,), bar=1.0))  # fmt: skip
        for name in (REGIONAL, ACCUMULATING):
            if name in trainers and GRAPHED in trainers:
                peaks = trainers[name].peak, trainers[GRAPHED].peak
                figures.append(Figure(name=f"peak memory, {name}", unit=f"/ {GRAPHED}",
                                      values=(peaks[0] / peaks[1],), bar=1.0))  # fmt: skip
    return tuple(figures)


def _first_difference(trainer: Trainer, expected: list[Tensor]) -> int | None:
    pairs = enumerate(zip(trainer.losses, expected, strict=False))
    return next((number for number, (one, other) in pairs if not torch.equal(one, other)), None)


def _same(trainer: Trainer, expected: list[Tensor]) -> str:
    differs = _first_difference(trainer, expected)
    return f"{min(len(trainer.losses), len(expected))} equal eager" if differs is None else f"differ at {differs}"


def _note(trainer: Trainer) -> str:
    totals = [recordings(one) for one in trainer.captured]
    if not totals:
        return ""
    counts = [sum(getattr(one, name) for one in totals) for name in ("recordings", "replays", "eager_calls")]
    reasons = {f"{f.code}: {f.what}" for one in totals for f in one.findings if str(f.severity) in ("eager", "error")}
    return "; ".join([f"{counts[0]} recordings, {counts[1]} replays, {counts[2]} eager calls", *sorted(reasons)])


# ------------------------------------------------------------------------------------------------------- mechanisms


def _optimizer(model: torch.nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-3, device=setting.device), fused=True, capturable=setting.on_gpu
    )


def _step(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(window: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _eager(model: GPT, setting: Setting) -> Trainer:
    return Trainer(_step(model, _optimizer(model, setting)))


def _compiled(**options: Any) -> Callable[[GPT, Setting], Trainer]:
    def build(model: GPT, setting: Setting) -> Trainer:
        compiled: Callable[[Tensor], Tensor] = torch.compile(model, **options)
        step = _step(compiled, _optimizer(model, setting))

        def marked(window: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return step(window)

        return Trainer(marked)

    return build


def _graphed(model: GPT, setting: Setting) -> Trainer:
    x = torch.randn(BATCH, LENGTH, model.place.shape[1], device=setting.device)
    if setting.on_gpu:  # torch's function replaces ``forward``; its warm-up leaves no gradients
        samples = tuple((x.clone().requires_grad_(),) for _ in model.blocks)
        torch.cuda.make_graphed_callables(tuple(model.blocks), samples)
    return _eager(model, setting)


class _Least(torch.autograd.Function):
    """A node around two graphs as an expert could write it. It is right in this loop alone: one call is pending at a
    time, weights and inputs are not written before the backward pass, and nobody holds a gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, pair: _Pair, x: Tensor) -> Tensor:
        ctx.pair = pair
        pair.x.copy_(x)
        pair.forward.replay()
        return pair.forward.output.detach()

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        pair: _Pair = ctx.pair
        pair.grad.copy_(grads[0])
        pair.backward()
        for parameter, gradient in zip(pair.parameters, pair.gradients[1:], strict=True):
            parameter.grad = gradient
        return None, pair.gradients[0].detach()


@define(eq=False)
class _Pair:
    x: Tensor
    grad: Tensor
    forward: Hand
    parameters: list[Tensor]
    backward: Callable[[], object] = object
    gradients: tuple[Tensor, ...] = ()


def _least(model: GPT, setting: Setting) -> Trainer:
    if setting.on_gpu:
        hands, shape = Hands(setting), (BATCH, LENGTH, model.place.shape[1])
        pairs = []
        for block in model.blocks:
            x = torch.randn(shape, device=setting.device, requires_grad=True)
            hand = hands.capture(lambda block=block, x=x: block(x))  # type: ignore[misc]
            pairs.append(_Pair(x.detach(), torch.randn_like(x), hand, list(block.parameters())))
            pairs[-1].gradients = (x,)
        for pair, block in reversed(list(zip(pairs, model.blocks, strict=True))):
            ends = [*pair.gradients, *pair.parameters]

            def backward(pair: _Pair = pair, ends: list[Tensor] = ends) -> Tensor:
                pair.gradients = torch.autograd.grad(pair.forward.output, ends, pair.grad, retain_graph=True)
                return pair.gradients[0]

            pair.backward = hands.capture(backward).replay
            block.forward = lambda x, pair=pair: _Least.apply(pair, x)  # type: ignore[no-untyped-call]
    return _eager(model, setting)


def _by_hand(model: GPT, setting: Setting) -> Trainer:
    """A step captured by hand. The steps that warm up and capture are undone, so that losses can be compared."""
    optimizer = _optimizer(model, setting)
    step, before = _step(model, optimizer), copy.deepcopy(model.state_dict())
    static = torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64, device=setting.device)
    hand = Hands(setting).capture(lambda: step(static), warmups=3)
    with torch.no_grad():
        model.load_state_dict(before)
        for values in optimizer.state.values():
            for value in values.values():
                value.zero_()

    def run(window: Tensor) -> Tensor:
        static.copy_(window)
        hand.replay()
        return hand.output

    return Trainer(run)


def _regional(gradients: Literal["autograd", "accumulate"]) -> Callable[[GPT, Setting], Trainer]:
    def build(model: GPT, setting: Setting) -> Trainer:
        for block in model.blocks:
            capture(block, gradients=gradients)
        return Trainer(_step(model, _optimizer(model, setting)), tuple(model.blocks))

    return build


def _whole(model: GPT, setting: Setting) -> Trainer:
    step = capture(_step(model, _optimizer(model, setting)))
    return Trainer(step, (step,))


MECHANISMS: dict[str, Callable[[GPT, Setting], Trainer]] = {
    EAGER: _eager, CUDAGRAPHS: _compiled(backend="cudagraphs"), REDUCE_OVERHEAD: _compiled(mode="reduce-overhead"),
    GRAPHED: _graphed, BY_HAND: _by_hand, LEAST: _least, REGIONAL: _regional("autograd"),
    ACCUMULATING: _regional("accumulate"), WHOLE: _whole,
}  # fmt: skip
