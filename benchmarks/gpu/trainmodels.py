"""Real models train, by region and as whole steps: 50 steps each, losses and final weights bit for bit eager's."""

from __future__ import annotations

import copy
import functools
import statistics
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.gpu import nets
from benchmarks.gpu.setting import Outcome, Setting, deterministic, last_lines, wall_ms
from benchmarks.timing import undisturbed
from capture import Severity, capture, config, mark_step_begin, recordings
from capture import reset as reset_captured

STEPS, ROUNDS, STEPS_A_ROUND = 50, 5, 10
HEADER = ("model", "captured", "equal", "recordings", "replays", "eager calls", "ms/step eager", "ms/step captured",
          "ratio", "why")  # fmt: skip
Batch = tuple[Tensor, ...]


@frozen
class Case:
    """``blocks``: what is captured by region."""

    name: str
    make: Callable[[Setting], nn.Module]
    batches: Callable[[Setting], list[Batch]]
    loss: Callable[[Any, Batch], Tensor]
    blocks: Callable[[Any], Sequence[nn.Module]]


class Training:
    """A twin of a model with its optimizer, from the same seed. ``how``: eager, by region, or whole steps."""

    def __init__(self, case: Case, start: nn.Module, how: str) -> None:
        self.model = model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step(*batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = case.loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step: Callable[..., Tensor] = capture(step) if how == "whole step" else step
        self.captured: list[Any] = [self.step] if how == "whole step" else []
        if how == "regions":
            self.captured = list(case.blocks(model))
            for block in self.captured:
                capture(block)
        self.losses: list[Tensor] = []

    def train(self, batches: list[Batch], count: int) -> None:
        """Make ``count`` steps over the batches, which repeat."""
        for number in range(count):
            mark_step_begin()
            self.losses.append(self.step(*batches[number % len(batches)]).clone())

    def state(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]


def measure(setting: Setting) -> Outcome:
    """The table, and what was wrong."""
    rows: list[tuple[str, ...]] = [HEADER]
    wrong: list[str] = []
    for case in CASES:
        try:
            with warnings.catch_warnings(), torch.enable_grad(), deterministic():
                warnings.simplefilter("ignore")  # the table says why
                proved, mistakes = _proved(case, setting)
        except Exception as error:  # noqa: BLE001 - the other models still run
            print(f"{case.name}:\n" + "".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
            proved = [(case.name, "", "FAILED", *[""] * (len(HEADER) - 4), last_lines(error))]
            mistakes = [f"{case.name} failed"]
        reset_captured()
        rows += proved
        wrong += mistakes
        for row in proved:
            print("  ".join(row), flush=True)
    return Outcome(rows=tuple(rows), wrong=tuple(wrong))


def _proved(case: Case, setting: Setting) -> tuple[list[tuple[str, ...]], list[str]]:
    start, batches, steps = case.make(setting), case.batches(setting), setting.pick(STEPS, 6)
    with config.patch(enabled=False):
        eager, again = (_trained(case, start, "eager", batches, steps) for _ in range(2))
    itself = _difference(eager, again)
    del again
    rows, mistakes = [], []
    for how in ("regions", "whole step"):
        trained = _trained(case, start, how, batches, steps)
        differs = _difference(eager, trained)
        totals = [recordings(captured) for captured in trained.captured]
        counts = [sum(getattr(total, name) for total in totals) for name in ("recordings", "replays", "eager_calls")]
        findings = [finding for total in totals for finding in total.findings]
        reasons = sorted({f"{f.code} {f.name}: {f.what}" for f in findings if f.severity >= Severity.EAGER})
        slow, fast = _timed(eager, trained, batches, setting)
        equal = ("yes" if differs is None else f"NO, {differs}") + (f" (eager itself: {itself})" if itself else "")
        rows.append((case.name, how, equal, *map(str, counts), f"{slow:.2f}", f"{fast:.2f}", f"{fast / slow:.2f}",
                     "; ".join(reasons)[:200]))  # fmt: skip
        if differs is not None and itself is None:
            mistakes.append(f"{case.name}, {how}: {differs} is not what eager gives")
        if not counts[1] and not reasons:
            mistakes.append(f"{case.name}, {how}: never replayed, and no finding says why")
        del trained
        reset_captured()
    return rows, mistakes


def _trained(case: Case, start: nn.Module, how: str, batches: list[Batch], steps: int) -> Training:
    torch.manual_seed(17)
    training = Training(case, start, how)
    training.train(batches, steps)
    training.final = [tensor.detach().clone() for tensor in training.state()]  # type: ignore[attr-defined]
    return training


def _difference(one: Any, other: Any) -> str | None:
    for number, (a, b) in enumerate(zip(one.losses, other.losses, strict=False)):
        if not torch.equal(a, b):
            return f"loss of step {number}"
    same = all(torch.equal(a, b) for a, b in zip(one.final, other.final, strict=True))
    return None if same else "final weights"


def _timed(eager: Training, captured: Training, batches: list[Batch], setting: Setting) -> tuple[float, float]:
    """Wall milliseconds a step of both, medians of rounds in turn."""
    count = setting.pick(STEPS_A_ROUND, 2)
    times: list[tuple[float, float]] = []
    with undisturbed():
        for _ in range(setting.pick(ROUNDS, 2)):
            with config.patch(enabled=False):
                slow = wall_ms(lambda: eager.train(batches, count), setting) / count
            times.append((slow, wall_ms(lambda: captured.train(batches, count), setting) / count))
    slow_ms, fast_ms = (statistics.median(side) for side in zip(*times, strict=True))
    return slow_ms, fast_ms


# ------------------------------------------------------------------------------------------------------------- models


def _tokens(vocabulary: Callable[[Setting], int], length: int = 128) -> Callable[[Setting], list[Batch]]:
    def batches(setting: Setting) -> list[Batch]:
        generator = torch.Generator().manual_seed(3)
        shape = (10, 2, setting.pick(length, 16))
        drawn = torch.randint(vocabulary(setting), shape, generator=generator).to(setting.device)
        seen = torch.ones(shape[-1], shape[-1], dtype=torch.bool, device=setting.device).tril()
        mask = seen.expand(shape[1], 1, -1, -1).clone()  # without a mask transformers reads values on the host
        return [(one.clone(), mask) for one in drawn]

    return batches


def _pictures(setting: Setting) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    pixels = setting.pick(224, 32)
    images = torch.randn(10, 2, 3, pixels, pixels, generator=generator).to(setting.device)
    labels = torch.randint(10, (10, 2), generator=generator).to(setting.device)
    return [(one.clone(), label.clone()) for one, label in zip(images, labels, strict=True)]


def _causal(model: Any, batch: Batch) -> Tensor:
    logits = model(batch[0], attention_mask=batch[1], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[0][:, 1:].flatten())


def _classified(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _for_training(model: Any) -> Any:
    return model.requires_grad_(True).train()


def _gpt2(setting: Setting) -> Any:
    return _for_training(nets.gpt2(setting))


def _llama(setting: Setting, *, reentrant: bool) -> Any:
    """Llama-shaped, 160 million parameters, dropout in attention, activations computed again in the backward pass."""
    big = setting.pick(True, False)
    package = nets.transformers()
    shape = package.LlamaConfig(
        hidden_size=768 if big else 64, num_hidden_layers=12 if big else 2, num_attention_heads=12 if big else 4,
        num_key_value_heads=12 if big else 2, intermediate_size=3072 if big else 128,
        vocab_size=32_000 if big else 256, max_position_embeddings=512, attention_dropout=0.1,
    )  # fmt: skip
    torch.manual_seed(6)
    model = package.AutoModelForCausalLM.from_config(shape).to(setting.device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return _for_training(model)


def _vision(name: str) -> Callable[[Setting], Any]:
    return lambda setting: _for_training(nets.vision(name, setting))


class Recurrent(nn.Module):
    """Two LSTM layers over embedded tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.token(ids))
        logits: Tensor = self.head(hidden)
        return logits


def _recurrent(setting: Setting) -> Any:
    torch.manual_seed(8)
    return Recurrent(setting.pick(256, 32)).to(setting.device)


def _next_character(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0])[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


def _mixture(setting: Setting) -> Any:
    return _for_training(nets.mixtral(setting, "batched_mm"))


def _residual_stages(model: Any) -> list[nn.Module]:
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


CASES = (
    Case("GPT-2 small", _gpt2, _tokens(lambda s: s.pick(50_257, 256)), _causal, lambda m: m.transformer.h),
    *[Case(f"Llama 160M, {kind} checkpoints, dropout", functools.partial(_llama, reentrant=kind == "reentrant"),
           _tokens(lambda s: s.pick(32_000, 256)), _causal, lambda m: m.model.layers)
      for kind in ("reentrant", "other")],
    Case("ResNet-50", _vision("resnet50"), _pictures, _classified, _residual_stages),
    Case("ViT-B/16", _vision("vit_b_16"), _pictures, _classified, lambda m: list(m.encoder.layers)),
    Case("LSTM, 2 layers", _recurrent, _tokens(lambda _: 256, 64), _next_character, lambda m: [m.lstm]),
    Case("Mixtral-like, batched experts", _mixture, _tokens(lambda s: s.pick(32_000, 256)), _causal,
         lambda m: m.model.layers),
)  # fmt: skip
