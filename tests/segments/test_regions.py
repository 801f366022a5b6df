"""Parts of models that are trained, in whose forward pass the host reads values: forward passes in segments, and a
backward pass for each branch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from tests.support.regions import Wrapped, both, inputs, twins
from tests.support.regions import fresh as fresh

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        found: Tensor = self.b(y) if x.sum() > 0 else self.c(y) * 2
        return found


def is_any(m: Any, x: Tensor) -> Tensor:
    y, mask = torch.tanh(m.a(x)), x[:, 0] > 1
    if mask.any():
        y = torch.where(mask[:, None], m.b(y), y)
    found: Tensor = y.square()
    return found


def item(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(m.a(x))
    count = (x > 0).sum().item()
    found: Tensor = m.b(y) * count if count > 12 else m.c(y) / (count + 1)
    return found


def nonzero(m: Any, x: Tensor) -> Tensor:
    y, rows = m.a(x), (x[:, 0] > 0).nonzero().squeeze(1)
    found: Tensor = m.b(y[rows]) + rows.numel()
    return found


def masked(m: Any, x: Tensor) -> Tensor:
    """A region whose backward pass makes the host read values, too."""
    y = m.a(x)
    return torch.tanh(m.b(y[x[:, 0] > 0]))


def experts(m: Any, x: Tensor) -> Tensor:
    which, out = (x[:, :3] * 1).argmax(-1), torch.zeros_like(x)
    for number, expert in enumerate((m.a, m.b, m.c)):
        at = (which == number).nonzero().squeeze(1)
        if at.numel():
            out = out.index_add(0, at, expert(x[at]))
    return out


def logged(m: Any, x: Tensor) -> tuple[Tensor, float]:
    loss = m.a(x).square().mean()
    return loss, loss.item()


def logged_inside(m: Any, x: Tensor) -> dict[str, Any]:
    y = m.a(x)
    loss = y.square().mean()
    return {"y": y, "loss": loss, "value": loss.item()}


def drawn(m: Any, x: Tensor) -> Tensor:
    y = functional.dropout(m.a(x), 0.3)
    if x.sum() > 0:
        y = m.b(y)
    return functional.dropout(y, 0.2)


def recomputed(m: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(m, x, use_reentrant=False)
    return y * 2


def written(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(x.detach().sum(0))
    y: Tensor = m.a(x) + m.seen
    return y + m.b(y) if x.sum() > 0 else y


BODIES = [is_any, item, nonzero, masked, experts, logged, logged_inside, drawn, recomputed, written]


def tensors_in(result: Any) -> list[Tensor]:
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
    return [tensor for tensor in parts if isinstance(tensor, Tensor) and tensor.requires_grad]


def told(result: Any) -> list[Any]:
    return (
        list(result.values()) if isinstance(result, dict) else list(result) if isinstance(result, tuple) else [result]
    )


def losses(model: Any, number: int, run: Callable[..., Any]) -> list[Any]:
    """Two forward passes of different branches, then their backward passes, the last one first; in every fifth call the
    other one comes twice."""
    mark_step_begin()
    model.zero_grad()
    m, x, z = model.m[0], inputs(number % 2).requires_grad_(number % 4 < 2), inputs(number % 2 + 10)
    results = [run(m, x), run(m, z)]
    sums = [torch.stack([tensor.square().sum() for tensor in tensors_in(result)]).sum() for result in results]
    sums[1].backward()
    sums[0].backward(retain_graph=number % 5 == 4)
    if number % 5 == 4:
        sums[0].backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    return [*told(results[0]), *told(results[1]), x.grad, torch.rand(2)]


@pytest.mark.one_in(18)
@pytest.mark.parametrize("gradients", ["autograd", "accumulate"])
@pytest.mark.parametrize("body", BODIES)
def test_a_region_with_reads(body: Callable[..., Any], gradients: Any) -> None:
    mine, theirs = twins(lambda: Wrapped(Three()))
    run = capture(body, gradients=gradients)
    both(functools.partial(losses, run=run), mine, theirs, 16)
    assert recordings(run).replays >= 12, recordings(run)


def test_a_module_with_a_read() -> None:
    mine, theirs = twins(lambda: Wrapped(Three()))
    capture(mine.m[0])
    both(functools.partial(losses, run=lambda m, x: m(x)), mine, theirs, 12)
    assert recordings(mine.m[0]).replays >= 8


def test_one_form_of_two_branches() -> None:
    """Both branches save the same tensors, and their gradients differ."""
    mine, theirs = twins(lambda: Wrapped(Three()))

    @capture
    def run(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.a(x)
        return y * y if x.sum() > 0 else y * y.neg()

    both(functools.partial(losses, run=run), mine, theirs, 16)
    assert recordings(run).replays >= 16
