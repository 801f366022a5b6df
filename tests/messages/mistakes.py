"""Forty mistakes of a newcomer, each beside the program that follows the message's fix.

A mistake is a function that runs one program and gives what was captured (``recordings`` takes it), or raises.
``right`` is the program as the message says: it has to replay, or to give what was meant. Programs are small.
"""

from __future__ import annotations

import functools
import io
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

import capture as library
from capture import capture, recordings

ON_GPU = torch.get_default_device().type == "cuda"
Program = Callable[[], Any]


@frozen
class Mistake:
    """A program as a newcomer writes it, and as the message tells to write it."""

    name: str
    wrong: Program
    right: Program


MISTAKES: list[Mistake] = []


def mistake(right: Program) -> Callable[[Program], Program]:
    """Note the decorated program as a mistake that ``right`` mends."""

    def note(wrong: Program) -> Program:
        MISTAKES.append(Mistake(wrong.__name__, wrong, right))
        return wrong

    return note


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def calls(captured: Callable[..., Any], count: int = 8) -> Any:
    """Call it on other numbers each time, without gradients."""
    with torch.no_grad():
        for _ in range(count):
            captured(torch.randn(4, 8))
    return captured


# ------------------------------------------------------------------------------------------------------ whole steps


def step_with(make: Callable[[Iterable[Tensor]], torch.optim.Optimizer], *, outside: bool = False) -> Any:
    """A whole training step, or with the optimizer's step outside of it."""
    model = net()
    optimizer = make(model.parameters())

    @capture
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not outside:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for _ in range(24):  # a count that an optimizer reads is a whole number, which may come again for longer
        train_step(torch.randn(4, 8), torch.randn(4, 4))
        if outside:
            optimizer.step()
            optimizer.zero_grad()
    return train_step


def optimizer_of(name: str, **options: Any) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **options)


FUSED = {"fused": True, "capturable": ON_GPU}


@mistake(lambda: step_with(optimizer_of("Adam", **FUSED)))
def adam() -> Any:
    return step_with(optimizer_of("Adam"))


@mistake(lambda: step_with(optimizer_of("AdamW", **FUSED)))
def adamw_foreach() -> Any:
    return step_with(optimizer_of("AdamW", foreach=True))


@mistake(lambda: step_with(optimizer_of("Adagrad", fused=not ON_GPU), outside=ON_GPU))
def adagrad() -> Any:
    return step_with(optimizer_of("Adagrad"))


@mistake(lambda: step_with(optimizer_of("RAdam"), outside=True))
def radam() -> Any:
    return step_with(optimizer_of("RAdam"))


@mistake(lambda: step_with(optimizer_of("NAdam"), outside=True))
def nadam() -> Any:
    return step_with(optimizer_of("NAdam"))


@mistake(lambda: step_with(optimizer_of("ASGD"), outside=True))
def asgd() -> Any:
    return step_with(optimizer_of("ASGD"))


def scheduled(*, inside: bool = False, **options: Any) -> Any:
    """A step with a schedule that ends it, or that runs beside it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    @capture
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if inside:
            schedule.step()
        return loss.detach()

    for _ in range(20):
        train_step(torch.randn(4, 8), torch.randn(4, 4))
        if not inside:
            schedule.step()
    return train_step


def scheduled_tensor() -> Any:
    return scheduled(lr=torch.tensor(0.1), fused=True)


@mistake(scheduled_tensor)
def schedule_beside_the_step() -> Any:
    return scheduled(lr=0.1)


@mistake(scheduled_tensor)
def schedule_in_the_step() -> Any:
    return scheduled(lr=0.1, inside=True)


def stepping(end: Callable[[Tensor], Any], keeps_graph: bool = False, **options: Any) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @capture
    def train_step(x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward(retain_graph=keeps_graph)
        if options:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, **options)
        optimizer.step()
        optimizer.zero_grad()
        return end(loss)

    for _ in range(8):
        train_step(torch.randn(4, 8), torch.randn(4, 4))
    return train_step


@mistake(lambda: stepping(lambda loss: loss.detach()))
def returned_loss() -> Any:
    """A step that returns its loss, whose graph is kept. Where the graph is freed, the step is recorded."""
    return stepping(lambda loss: loss, keeps_graph=True)


@mistake(lambda: stepping(lambda loss: loss.detach()))
def returned_number() -> Any:
    def end(loss: Tensor) -> float:
        return loss.item()

    return stepping(end)


@mistake(lambda: stepping(lambda loss: loss.detach(), norm_type=2.0))
def clipping_that_checks() -> Any:
    return stepping(lambda loss: loss.detach(), error_if_nonfinite=True)


def in_bfloat16() -> Any:
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @capture
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(8):
        train_step(torch.randn(4, 8).bfloat16(), torch.randn(4, 4).bfloat16())
    return train_step


@mistake(in_bfloat16)
def gradient_scaler() -> Any:
    device = "cuda" if ON_GPU else "cpu"
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device)

    @capture
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(8):
        train_step(torch.randn(4, 8), torch.randn(4, 4))
    return train_step


# -------------------------------------------------------------------------------------- values and text of tensors


def of_one(body: Callable[[Tensor], Any]) -> Any:
    """A captured function of one tensor, called."""
    return calls(capture(body))


def doubled() -> Any:
    return of_one(lambda x: torch.relu(x) * 2)


@mistake(doubled)
def printed_tensor() -> Any:
    @capture
    def f(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        print("y:", y.sum() > 0)
        return y

    return calls(f)


@mistake(lambda: stepping(lambda loss: loss.detach()))
def printed_loss() -> Any:
    def end(loss: Tensor) -> Tensor:
        print("loss:", loss)
        return loss.detach()

    return stepping(end)


@mistake(doubled)
def formatted_tensor() -> Any:
    @capture
    def f(x: Tensor) -> tuple[Tensor, str]:
        y = torch.relu(x) * 2
        return y, f"{y.mean():.3f}"

    return calls(f)


@mistake(doubled)
def logged_tensor() -> Any:
    log = logging.getLogger("tests.messages")
    log.handlers, log.propagate = [logging.StreamHandler(io.StringIO())], False

    @capture
    def f(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        log.warning("y %s", y.mean())
        return y

    return calls(f)


@mistake(doubled)
def list_of_a_tensor() -> Any:
    @capture
    def f(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        return y.tolist()

    return calls(f)


@mistake(doubled)
def numpy_of_a_tensor() -> Any:
    @capture
    def f(x: Tensor) -> Any:
        y = torch.relu(x) * 2
        return y, y.cpu().numpy().mean()

    return calls(f)


@mistake(doubled)
def tensor_made_of_an_array() -> Any:
    @capture
    def f(array: Any) -> Tensor:
        return torch.relu(torch.from_numpy(array)) * 2

    with torch.no_grad():
        for _ in range(6):
            f(np.ones((4, 8), dtype=np.float32))
    return f


@mistake(doubled)
def branch_on_a_value() -> Any:
    @capture
    def f(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return torch.relu(x) * 2
        return torch.relu(x) * 3

    return calls(f, 12)


@mistake(lambda: of_one(lambda x: torch.relu(x) / x.max()))
def number_in_the_middle() -> Any:
    @capture
    def f(x: Tensor) -> Tensor:
        largest = float(f"{x.max().item():.3f}")
        return torch.relu(x) / largest

    return calls(f, 12)


@mistake(lambda: of_one(lambda x: torch.where(x > 0, x, 0) * 2))
def elements_by_a_mask() -> Any:
    @capture
    def f(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    return calls(f, 12)


def noisy(noise: Callable[[Tensor], Any]) -> Any:
    @capture
    def f(x: Tensor) -> Any:
        return torch.relu(x) * noise(x)

    return calls(f)


@mistake(lambda: noisy(lambda x: torch.rand(())))
def numbers_of_numpy() -> Any:
    def noise(x: Tensor) -> float:
        return float(np.random.rand())

    return noisy(noise)


@mistake(lambda: noisy(lambda x: torch.rand(())))
def numbers_of_python() -> Any:
    def noise(x: Tensor) -> float:
        return random.random()

    return noisy(noise)


# ------------------------------------------------------------------------------------------ state, hooks, containers


class Counting(nn.Module):
    def __init__(self, in_a_tensor: bool) -> None:
        super().__init__()
        self.layer = net()
        self.calls: Any = 0
        if in_a_tensor:
            del self.calls
            self.register_buffer("calls", torch.zeros(()))

    @override
    @capture
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x)
        return out


@mistake(lambda: calls(Counting(in_a_tensor=True)))
def counter_of_a_module() -> Any:
    return calls(Counting(in_a_tensor=False))


@mistake(doubled)
def list_that_grows() -> Any:
    history: list[Tensor] = []

    @capture
    def f(x: Tensor) -> Tensor:
        y = torch.relu(x) * 2
        history.append(y.mean())
        return y

    return calls(f)


@mistake(lambda: calls(capture(net())))
def hook_that_prints() -> Any:
    model = net()
    model[0].register_forward_hook(lambda module, args, out: print("mean:", out.mean() < 100))
    return calls(capture(model))


@mistake(lambda: calls(capture(net())))
def hook_that_collects() -> Any:
    model, seen = net(), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out))
    return calls(capture(model))


def scaled(number: Callable[[float], Any]) -> Any:
    @capture
    def f(x: Tensor, scale: Any) -> Tensor:
        known = isinstance(scale, Tensor) or hash(scale) != 1  # Python reads it, so it is no operator's alone
        scaled: Tensor = torch.relu(x) * scale * known
        return scaled

    with torch.no_grad():
        for step in range(24):
            f(torch.randn(4, 8), number(1 / (step + 1)))
    return f


@mistake(lambda: scaled(torch.tensor))
def number_that_changes() -> Any:
    return scaled(lambda number: number)


def of_sizes(**options: Any) -> Any:
    captured = capture(net(), **options)
    with torch.no_grad():
        for _ in range(4):
            for n in range(1, 9):
                captured(torch.randn(n, 8))
    return captured


@mistake(lambda: of_sizes(buckets={"input": {0: (4, 8)}}, tolerance=1e-4))
def too_many_sizes() -> Any:
    return of_sizes()


def without_padding() -> Any:
    @capture(buckets={"x": {0: (8,)}, "rows": {0: (8,)}}, tolerance=1e-5)
    def centred(x: Tensor, rows: Tensor) -> Tensor:
        return torch.relu(x) - (x * rows[:, None]).sum(0) / rows.sum()

    calls(functools.partial(centred, rows=torch.ones(4)))
    return centred


@mistake(without_padding)
def padding_that_shows() -> Any:
    @capture(buckets={"x": {0: (8,)}})
    def f(x: Tensor) -> Tensor:
        return torch.relu(x) - x.mean(0)

    return calls(f)


class Cache:
    def __init__(self) -> None:
        self.keys = torch.zeros(4, 8)


def with_cache(cache: Callable[[], Cache]) -> Any:
    @capture(static=["cache"])
    def f(x: Tensor, cache: Cache) -> Tensor:
        cache.keys.add_(x)
        return cache.keys * 2

    with torch.no_grad():
        for _ in range(20):
            f(torch.randn(4, 8), cache())
    return f


@mistake(lambda: with_cache(functools.partial(lambda one: one, Cache())))
def cache_that_is_new_in_every_call() -> Any:
    return with_cache(Cache)


@mistake(lambda: of_one(lambda x: torch.eye(4) @ x * 2))
def sparse_argument() -> Any:
    @capture
    def f(weight: Tensor, x: Tensor) -> Tensor:
        return weight @ x * 2

    with torch.no_grad():
        for _ in range(4):
            f(torch.eye(4).to_sparse(), torch.randn(4, 8))
    return f


def preserved() -> Any:
    def body(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    captured = capture(body, outputs="preserve")
    with torch.no_grad():
        kept = [captured(torch.randn(4, 8)) for _ in range(5)]
    assert kept[1].shape == (kept[1] + 1).shape
    return captured


@mistake(preserved)
def borrowed_output_kept() -> Any:
    @capture(outputs="borrow")
    def f(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    with torch.no_grad():
        kept = [f(torch.randn(4, 8)) for _ in range(5)]
        return kept[1] + 1


def replays_of(captured: Any) -> int:
    """Replays of what a program gives; what gives no captured function has to be the right thing by itself."""
    if isinstance(captured, (list, str, library.Recordings)):
        return 1
    return recordings(captured).replays
