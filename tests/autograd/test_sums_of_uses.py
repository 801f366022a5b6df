"""Tensors that are used several times: their gradients are added up in eager's order, inside a region and outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import assert_same_sums, bits, inputs, kept
from tests.support.regions import fresh as fresh


def block(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ w + torch.sin(x @ w)


def mixed(w: Tensor, x: Tensor) -> Tensor:
    """Argument and weight several times, twice in one operator, and as views."""
    return (x * x) @ w.t() + torch.tanh(x) @ (w * w) - x.sum(0) * w[0]


class Scaled(torch.autograd.Function):
    """A user's function of a tensor that other operators use, too."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.sum()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w.sum(), (grad * x).sum().expand_as(w)


def with_function(w: Tensor, x: Tensor) -> Tensor:
    scaled: Tensor = Scaled.apply(x @ w, w)  # type: ignore[no-untyped-call]
    return scaled + x @ w.exp()


Body = Callable[[Tensor, Tensor], Tensor]
Program = Callable[[Body, Tensor, int], list[Any]]
BODIES: dict[str, Body] = {one.__name__: one for one in (block, mixed, with_function)}


def one_pass(f: Body, w: Tensor, number: int) -> list[Any]:
    """Several calls before one backward pass."""
    y = inputs(number)
    for _ in range(3):
        y = f(w, y)
    y.sum().backward()
    return [y]


def used_outside(f: Body, w: Tensor, number: int) -> list[Any]:
    """A program in which eager code uses the region's weight before, between and after its calls."""
    x = inputs(number).requires_grad_()
    y = torch.sin(x @ w) + x
    z = f(w, y) * y
    y = f(w, torch.cos(z @ w) + y) * z
    (y @ w).square().sum().backward()
    return [y, x.grad]


def accumulated(f: Body, w: Tensor, number: int) -> list[Any]:
    """Several passes add to one ``.grad``."""
    for at in range(3):
        (f(w, f(w, inputs(number + at))) @ w).sum().backward()
    return []


def repeated(f: Body, w: Tensor, number: int) -> list[Any]:
    """Two backward passes through a graph that is kept."""
    y = f(w, torch.tanh(f(w, inputs(number))))
    y.sum().backward(retain_graph=True)
    first = w.grad.clone()  # type: ignore[union-attr]
    y.square().sum().backward()
    return [first]


def hooked(f: Body, w: Tensor, number: int) -> list[Any]:
    """A hook on a tensor used several times is called once, with the sum."""
    seen: list[Tensor] = []

    def doubled(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 2

    handle = w.register_hook(doubled)
    y = inputs(number).requires_grad_()
    h = y * 2
    h.retain_grad()
    z = f(w, f(w, h)) + h
    z.sum().backward()
    handle.remove()
    return [len(seen), *seen, h.grad, y.grad]


def chosen(f: Body, w: Tensor, number: int) -> list[Any]:
    """A backward pass for some gradients alone."""
    x = inputs(number).requires_grad_()
    y = f(w, x) @ w
    found = [*torch.autograd.grad(y.sum(), x, retain_graph=True), *torch.autograd.grad(y.sum(), w, retain_graph=True)]
    return [*found, *torch.autograd.grad(y.square().sum(), [w, x])]


def recomputed(f: Body, w: Tensor, number: int) -> list[Any]:
    """The call runs again in the backward pass, under a checkpoint."""
    x = inputs(number).requires_grad_()
    y = checkpoint(lambda a: f(w, torch.sin(f(w, a))), x, use_reentrant=True)
    (f(w, y) * y).sum().backward()
    return [y, x.grad]


def without_gradients_between(f: Body, w: Tensor, number: int) -> list[Any]:
    y = f(w, inputs(number))
    with torch.no_grad():
        z = f(w, y)
    y = f(w, y * z)
    y.sum().backward()
    return [y, z]


PROGRAMS: dict[str, Program] = {
    one.__name__: one
    for one in (
        one_pass,
        used_outside,
        accumulated,
        repeated,
        hooked,
        chosen,
        recomputed,
        without_gradients_between,
    )
}


def made(f: Body, program: Program, *, keeps: bool) -> list[Any]:
    w, log = nn.Parameter(inputs(99, 6, 6) / 3), []
    for number in range(7):
        if not keeps:
            w.grad = None
        tensors = program(f, w, number)
        log.append([*map(bits, tensors), bits(w.grad)])
        with torch.no_grad():
            w.sub_(w.detach() * 0.01)
    return log


@pytest.mark.one_in(9)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("body", BODIES)
def test_in_eagers_order(body: str, program: str) -> None:
    f = capture(BODIES[body])
    assert made(f, PROGRAMS[program], keeps=False) == made(BODIES[body], PROGRAMS[program], keeps=False)
    assert recordings(f).replays >= 5
    assert made(f, PROGRAMS[program], keeps=True) == made(BODIES[body], PROGRAMS[program], keeps=True)


class Tied(nn.Module):
    """Weights of one module that others use as well: two regions and eager code."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        if options.pop("captures"):
            for module in (self.first, self.second, self.head):
                capture(module, **options)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(2):
            x = x + torch.tanh(self.second(torch.relu(self.first(x))))
        y: Tensor = self.head(x) + x @ self.first.weight @ self.embedding.weight.t()
        return y


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps", [1, 3])
def test_tied_weights(steps: int) -> None:
    models = []
    for captures in (False, True):
        torch.manual_seed(1)
        models.append(Tied(captures=captures).to(DEVICE))
    optimizers = [torch.optim.SGD(tied.parameters(), lr=0.1) for tied in models]
    for number in range(8):
        grads = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for at in range(steps):
                generator = torch.Generator(DEVICE).manual_seed(number + at)
                ids = torch.randint(10, (5,), generator=generator, device=DEVICE)
                model(ids).logsumexp(-1).mean().backward()
            grads.append([bits(parameter.grad) for parameter in model.parameters()])
            optimizer.step()
        assert grads[0] == grads[1]


def test_gradients_of_gradients_of_what_is_used_several_times() -> None:
    for before in (0, 4):
        f, log = capture(mixed), []
        for function in (mixed, f):
            w, x = nn.Parameter(inputs(99, 6, 6)), inputs(3).requires_grad_()
            for _ in range(before):
                (function(w, x) @ w).sum().backward()
            w.grad = x.grad = None
            y = function(w, x * 2) @ w
            (d,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (d.square().sum() + y.square().sum()).backward()
            log.append([kept(tensor) for tensor in (d, w.grad, x.grad)])
        assert_same_sums(*log)
