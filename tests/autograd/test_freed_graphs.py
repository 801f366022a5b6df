"""Steps that run their own backward pass and return the loss undetached, with a graph that autograd has freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE, EXECUTES
from tests.support.regions import bits

Body = Callable[["Trainer", Tensor], Any]
SEVERAL = (5,) if EXECUTES else (4, 5)
"""Possible numbers of replays in eight calls: where the recording run does not execute, one call more may be needed."""


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.last: Any = None

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), x[:, :2])

    def update(self, loss: Tensor, **options: Any) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward(**options)
        self.optimizer.step()
        return loss


class Square(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @override
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def squared(x: Tensor) -> Tensor:
    found: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return found


def with_output(t: Trainer, x: Tensor) -> Any:
    found = t.net(x)
    return {"loss": t.update(F.cross_entropy(found, x.argmax(1) % 2)), "logits": found, "mean": found.detach().mean()}


def kept(t: Trainer, x: Tensor) -> Any:
    t.last = t.update(t.loss(x))
    return t.last


def logged(t: Trainer, x: Tensor) -> Any:
    loss = t.update(t.loss(x))
    t.last = loss.detach()
    return loss


def beside_its_alias(t: Trainer, x: Tensor) -> Any:
    loss = t.update(t.loss(x))
    return {"log": loss.detach(), "loss": loss, "again": loss.data}


def micro_batch(t: Trainer, x: Tensor) -> Any:
    loss = t.loss(x)
    (loss / 2).backward()
    return loss


def differentiated_twice(t: Trainer, x: Tensor) -> Any:
    """A step of a network that solves a differential equation: the loss has the slope by a leaf that the body makes."""
    at = x.clone().requires_grad_()
    u = t.net(at)
    (slope,) = torch.autograd.grad(u.sum(), at, create_graph=True)
    return t.update((slope[:, :2] + u).square().mean())


REPLAYED: dict[str, Body] = {
    "loss": lambda t, x: t.update(t.loss(x)),
    "with its output": with_output,
    "kept": kept,
    "logged": logged,
    "beside its alias": beside_its_alias,
    "micro batch": micro_batch,
    "sum of two": lambda t, x: t.update(t.loss(x)) + t.update(t.loss(x * 2)),
    "function of users": lambda t, x: t.update(squared(t.net(x)).sum()),
    "checkpoint": lambda t, x: t.update(checkpoint(t.net, x, use_reentrant=False).sum()),
    "twice the same": lambda t, x: [t.update(t.loss(x))] * 2,
}
if DEVICE.type == "cpu":  # on a GPU eager's own order of sums differs between runs: see ``assert_same_sums``
    REPLAYED["differentiated twice"] = differentiated_twice
NOT_FREED: dict[str, Body] = {
    "retained": lambda t, x: t.update(t.loss(x), retain_graph=True),
    "nothing saved": lambda t, x: t.update(next(t.net.parameters()).sum()),
    "a view of its alias": lambda t, x: [loss := t.update(t.loss(x)), loss.detach().view(1)],
    "a view": lambda t, x: t.update(t.loss(x)).view(1),
    "checkpoint and its forward pass": lambda t, x: (t.update(t.loss(x)), checkpoint(t.net, x, use_reentrant=False)),
}


def raised(found: Tensor) -> str:
    try:
        found.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def shown(t: Trainer, result: Any, *, backward: bool) -> Any:
    flat = torch.utils._pytree.tree_leaves((result, t.last))
    tensors = [one for one in flat if one is not None]
    parameters = [*t.net.parameters()]
    told = [(repr(one), one.is_leaf, one.requires_grad, bits(one.detach())) for one in tensors]
    errors = [raised(one) for one in tensors if one.requires_grad] if backward else []
    return told, errors, [(bits(one.detach()), bits(one.grad)) for one in parameters if one.grad is not None]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", [*REPLAYED, *NOT_FREED])
@pytest.mark.parametrize("backward", [False, True])
def test_a_loss_that_was_differentiated(name: str, *, backward: bool) -> None:
    body = (REPLAYED | NOT_FREED)[name]
    mine, theirs = Trainer(), Trainer()
    step = capture(lambda x: body(mine, x), silence=["CG501"])
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(5, 3, device=DEVICE)
        assert shown(mine, step(x), backward=backward) == shown(theirs, body(theirs, x), backward=backward)
    replays = recordings(step).replays
    assert (replays in SEVERAL) if name in REPLAYED else replays == 0


def test_losses_are_added_up_and_written() -> None:
    """What users do with a loss: sum it up over an epoch, scale it in place, keep all of them."""
    mine, theirs = Trainer(), Trainer()
    step = capture(lambda x: REPLAYED["loss"](mine, x))

    def epoch(step: Callable[[Tensor], Any]) -> Any:
        total, losses = 0.0, []
        for seed in range(8):
            torch.manual_seed(seed)
            loss = step(torch.randn(5, 3, device=DEVICE))
            losses.append(loss)
            total = total + loss
            loss /= 2
        return repr(total), repr(torch.stack(losses).mean()), [bits(kept.detach()) for kept in losses]

    assert epoch(step) == epoch(lambda x: REPLAYED["loss"](theirs, x))
    assert recordings(step).replays in SEVERAL


def test_a_loss_and_its_alias_are_written() -> None:
    x, mine, theirs = torch.randn(5, 3, device=DEVICE), Trainer(), Trainer()
    step, seen = capture(lambda x: logged(mine, x)), list[Any]()
    for trainer, run in ((mine, step), (theirs, lambda x: logged(theirs, x))):
        for _ in range(8):
            loss = run(x)
            before = loss._version, trainer.last._version
            with torch.no_grad():
                loss.mul_(2)
            trainer.last.add_(1)
            versions = loss._version - before[0], trainer.last._version - before[1]
            seen.append((bits(loss.detach()), bits(trainer.last), versions, loss.is_leaf, trainer.last.requires_grad))
    assert seen[:8] == seen[8:]
    assert recordings(step).replays in SEVERAL
