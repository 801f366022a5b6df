"""Leaves that a body makes and differentiates for die with it: samplers, filters, inner loops of meta-learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from capture import capture, recordings
from tests.support.device import DEVICE, EXECUTES
from tests.support.regions import bits


def energy(w: Tensor) -> Tensor:
    return (w**4).sum()


def gradient(w: Tensor) -> Tensor:
    w = w.detach().requires_grad_()
    return torch.autograd.grad(energy(w), w)[0]


def leapfrog(x: Tensor) -> Any:
    w, p = x, x.sin()
    for _ in range(3):
        w = w + 0.1 * p
        p = p - 0.1 * gradient(w)
    return w, p


def inner_loop(x: Tensor) -> Tensor:
    fast = [one.detach().requires_grad_() for one in x.unbind()]
    for _ in range(2):
        loss = torch.stack([(one * x).sum() ** 2 for one in fast]).sum()
        gradients = torch.autograd.grad(loss, fast, create_graph=True)
        fast = [one - 0.01 * grad for one, grad in zip(fast, gradients, strict=True)]
    return torch.stack(fast).detach()


def by_grad(x: Tensor) -> Any:
    w = (x * 2).requires_grad_()
    energy(w).backward()
    return w.grad if w.grad is not None else x


def jacobian(x: Tensor) -> Tensor:
    y = torch.stack([x[0] + 0.1 * torch.sin(x[1]), x[1] * 0.95])
    return jacrev(lambda one: (one**2).sum(0))(y)  # type: ignore[no-any-return]


BODIES: list[Callable[[Tensor], Any]] = [gradient, leapfrog, inner_loop, by_grad, jacobian]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("body", BODIES, ids=lambda one: one.__name__)
def test_replayed(body: Callable[[Tensor], Any]) -> None:
    step = capture(body)
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, device=DEVICE)
        found, expected = [torch.utils._pytree.tree_leaves(one(x)) for one in (step, body)]
        assert list(map(bits, found)) == list(map(bits, expected))
    assert recordings(step).replays in ((6,) if EXECUTES else (4, 5, 6))
