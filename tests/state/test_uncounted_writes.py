"""What a body writes through ``tensor.data`` moves no version counter, and no replay may move one: a graph of the
caller's that saved the tensor before would then refuse its backward pass, which eager does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.observed import bits, fresh, x_of

__all__ = ["fresh"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def state(wrap: Wrap) -> tuple[Any, list[Any]]:
    weight = nn.Parameter(x_of(1, 4))

    def body() -> None:
        weight.data.mul_(0.9)

    body = wrap(body)
    return body, [pending(weight, body) for _ in range(6)]


def state_read_as_well(wrap: Wrap) -> tuple[Any, list[Any]]:
    weight = nn.Parameter(x_of(1, 4))

    def body(x: Tensor) -> Tensor:
        before = weight * x
        weight.data.add_(x)
        weight.data[1:3] = 0.5
        return before + weight

    body = wrap(body)
    return body, [pending(weight, body, x_of(seed, 4)) for seed in range(6)]


def lists_of_weights(wrap: Wrap) -> tuple[Any, list[Any]]:
    weights = [nn.Parameter(x_of(seed, 4)) for seed in range(3)]

    def body() -> None:
        torch._foreach_mul_([weight.data for weight in weights[:2]], 0.9)
        torch._foreach_add_([weights[2].detach()], 1.0)

    body = wrap(body)
    seen = [[*[pending(weight, body) for weight in weights[:2]], weights[2]._version] for _ in range(6)]
    return body, seen


def an_argument(wrap: Wrap) -> tuple[Any, list[Any]]:
    def body(weight: Tensor) -> None:
        weight.data.mul_(0.9)

    body, seen = wrap(body), []
    for seed in range(6):
        weight = nn.Parameter(x_of(seed, 4))
        seen.append(pending(weight, body, weight))
    return body, seen


def arguments_that_share_memory(wrap: Wrap) -> tuple[Any, list[Any]]:
    def body(first: Tensor, second: Tensor) -> None:
        first.data.mul_(0.9)
        second.data.add_(1)

    body, seen = wrap(body), []
    for seed in range(6):
        whole = x_of(seed, 8)
        seen.append([pending(whole, body, whole[:5], whole[3:]), whole])
    return body, seen


def what_another_call_gave(wrap: Wrap) -> tuple[Any, list[Any]]:
    def body(given: Tensor) -> None:
        given.data.mul_(0.9)

    body, make, seen = wrap(body), wrap(torch.sin), []
    for seed in range(6):
        given = make(x_of(seed, 4))
        seen.append(pending(given, body, given))
    return body, seen


def steps_of_an_optimizer(wrap: Wrap) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    @torch.enable_grad()
    def body(x: Tensor) -> Any:
        loss = net(x).pow(2).sum()
        loss.backward()
        for weight in net.parameters():
            assert weight.grad is not None
            weight.data.add_(weight.grad.data, alpha=-0.1)
            weight.grad.data.zero_()
        return loss.detach()

    body, seen = wrap(body), []
    for seed in range(8):
        first = next(net.parameters())
        seen.append([pending(first, body, x_of(seed)), [weight._version for weight in net.parameters()]])
    return body, seen


def counted_as_well(wrap: Wrap) -> tuple[Any, list[Any]]:
    """A write that autograd sees, beside one that it does not."""
    weight = nn.Parameter(x_of(1, 4))

    def body() -> None:
        weight.data.mul_(0.9)
        weight.add_(1)

    body, seen = wrap(body), []
    for _ in range(6):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pending(weight, body)
        seen.append(weight.detach().clone())
    return body, seen


def pending(weight: Tensor, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a graph that saved the tensor before the call gives after it."""
    at, before = torch.ones(4).requires_grad_(), weight._version
    with torch.enable_grad():
        loss = (at * weight.detach()[:4]).sum()
    result = body(*arguments)
    loss.backward()
    return [result, at.grad, weight.detach().clone(), weight._version - before]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "program",
    [state, state_read_as_well, lists_of_weights, an_argument, arguments_that_share_memory, what_another_call_gave,
     steps_of_an_optimizer, counted_as_well],
)  # fmt: skip
def test_writes_that_autograd_does_not_see(program: Callable[[Wrap], tuple[Any, list[Any]]]) -> None:
    _, expected = program(lambda body: body)
    body, seen = program(capture)
    assert bits(seen) == bits(expected)
    assert recordings(body).replays >= 2
