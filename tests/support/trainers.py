"""A trainer that is captured or eager, and its bodies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, config, mark_step_begin
from capture.tree import thread_trees
from tests.support.device import DEVICE

STEPS = 12
Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.enable_grad(), config.patch(cache=False):
        yield


def bits(value: Any) -> Any:
    """A tensor, or None, as bytes."""
    return value.detach().numpy(force=True).tobytes() if isinstance(value, Tensor) else value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.norm(F.gelu(self.a(x))))
        return y


class Muon(torch.optim.Optimizer):
    """A made-up optimizer with state in tensors only: momentum, then a few matrix products."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(group["beta"]).add_(p.grad)
                update = state["m"]
                if p.dim() == 2:
                    update = update / (update.norm() + 1e-7)
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                p.add_(update, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd one by one": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "muon": lambda p: Muon(p),
}
if DEVICE.type == "cuda":
    OPTIMIZERS["adam capturable"] = lambda p: torch.optim.Adam(p, lr=0.01, capturable=True)
    OPTIMIZERS["adamw foreach"] = lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, foreach=True)


class Trainer:
    """A model, its optimizer and a step over both."""

    def __init__(self, model: nn.Module, optimizer: str | Callable[[Any], torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizer = (OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(model.parameters())

    def values(self) -> list[Any]:
        """Everything a step may change."""
        found: list[Any] = []
        for p in self.model.parameters():
            found += [bits(p), bits(p.grad)]
        for state in self.optimizer.state.values():
            found += [(name, bits(value)) for name, value in state.items()]
        return found


Body = Callable[[Trainer, Tensor, Tensor], Any]


def plain_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    t.optimizer.zero_grad()
    loss = F.mse_loss(t.model(x), y)
    loss.backward()
    t.optimizer.step()
    return loss.detach()


def zeroing_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    t.optimizer.zero_grad(set_to_none=False)
    loss = F.mse_loss(t.model(x), y)
    loss.backward()
    t.optimizer.step()
    return loss.detach()


def zeroing_at_the_end(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(t.model(x), y)
    loss.backward()
    t.optimizer.step()
    t.optimizer.zero_grad()
    return loss.detach()


def clipped_step(t: Trainer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    t.optimizer.zero_grad()
    loss = F.mse_loss(t.model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    t.optimizer.step()
    return loss.detach(), norm


def gradients_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    parameters = list(t.model.parameters())
    loss = F.mse_loss(t.model(x), y)
    with torch.no_grad():
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.sub_(g, alpha=0.1)
    return loss.detach()


def flat_step(t: Trainer, x: Tensor, y: Tensor) -> Tensor:
    """A step whose gradients are views of one tensor, as those that ``fully_shard`` reduces together."""
    t.optimizer.zero_grad()
    parameters = list(t.model.parameters())
    loss = F.mse_loss(t.model(x), y)
    flat, at = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]), 0
    for p in parameters:
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    t.optimizer.step()
    return loss.detach()


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 6, generator=generator, device="cpu").to(DEVICE),
         torch.randn(4, 3, generator=generator, device="cpu").to(DEVICE))
        for _ in range(count)
    ]  # fmt: skip


def pair(body: Body, optimizer: Any = "sgd momentum", **options: Any) -> tuple[Trainer, Step, Trainer, Step]:
    """The same training twice: captured, and eager."""
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    mine, theirs = Trainer(model, optimizer), Trainer(copy.deepcopy(model), optimizer)
    return mine, capture(lambda x, y: body(mine, x, y), **options), theirs, lambda x, y: body(theirs, x, y)


def run(mine: Trainer, step: Step, theirs: Trainer, eager: Step, data: list[Batch], *, marks: bool = False) -> None:
    """Run both step by step from the same seeds, and compare everything after each step."""
    for number, (x, y) in enumerate(data):
        if marks:
            mark_step_begin()
        torch.manual_seed(number)
        with config.patch(enabled=False):
            right = eager(x, y)
        torch.manual_seed(number)
        result = step(x, y)
        for mine_part, right_part in zip(*(v if isinstance(v, tuple) else (v,) for v in (result, right)), strict=True):
            assert bits(mine_part) == bits(right_part), f"step {number}: {mine_part} instead of {right_part}"
        assert mine.values() == theirs.values(), f"step {number}"
