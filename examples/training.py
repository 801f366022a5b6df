"""Training for the demo: a whole step, captured, beside an eager twin that must lose exactly the same."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from capture import capture, mark_step_begin, recordings
from examples.gpt import GPT

BATCH, LENGTH, WARM = 8, 64, 5  # the first steps observe and record, and are not timed
_BARS = "▁▂▃▄▅▆▇█"


class Trained(NamedTuple):
    """``losses``: of every captured step. The rates are steps per second, medians of the steps run both ways."""

    losses: list[float]
    eager_losses: list[float]
    same: bool
    eager_rate: float
    captured_rate: float
    counts: str


class Learner:
    """A model and its optimizer. The learning rate is a tensor: a schedule then needs no new recording."""

    def __init__(self, model: GPT, device: torch.device) -> None:
        self.model = model
        self.rate = torch.tensor(0.0, device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, fused=True)

    def step(self, window: Tensor) -> Tensor:
        """One step on ``window`` (B, T + 1); gives the loss."""
        self.optimizer.zero_grad()
        logits = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def train(model: GPT, tokens: Tensor, steps: int, seconds: float, compared: int, device: torch.device) -> Trained:
    """Until the steps or the seconds are used up; the first ``compared`` steps a second time on an eager twin."""
    twin, learner = Learner(copy.deepcopy(model), device), Learner(model, device)
    step = capture(learner.step)
    losses: list[float] = []
    eager_losses: list[float] = []
    times: list[tuple[float, float]] = []
    same = True
    begin = time.perf_counter()
    for number, window in enumerate(_windows(tokens, device)):
        done = max((number + 1) / steps, (time.perf_counter() - begin) / seconds)
        for one in (learner, twin):
            one.rate.fill_(8e-3 * min(1.0, 10 * done) * max(1.0 - done, 0.02))
        mark_step_begin()
        loss, took = _timed(step, window)
        if number < compared:
            other, eager_took = _timed(twin.step, window)
            same &= loss == other
            eager_losses.append(other)
            times.append((eager_took, took))
        losses.append(loss)
        if done >= 1.0:
            break
    timed = times[WARM:] or times
    rates = [1 / statistics.median(side) for side in zip(*timed, strict=True)]
    return Trained(losses, eager_losses, same, rates[0], rates[1], str(recordings(step)))


def curve(losses: list[float], width: int = 60) -> str:
    """The losses as one line of bars, means of equal parts."""
    parts = [losses[i * len(losses) // width : (i + 1) * len(losses) // width] for i in range(width)]
    means = [statistics.mean(part) for part in parts if part]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _windows(tokens: Tensor, device: torch.device) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=draws)
        yield torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()]).to(device)


def _timed(step: Callable[[Tensor], Tensor], window: Tensor) -> tuple[float, float]:
    begin = time.perf_counter()
    loss = float(step(window))  # waits for the device
    return loss, time.perf_counter() - begin
