"""``gradients="accumulate"`` where several regions give one parameter gradients in a pass: the sums are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits, inputs
from tests.support.regions import fresh as fresh

STEPS = 14
NOTICED = 3  # steps until the order of sums is eager's: watched, recorded, and the one that notices the other uses
Forward = Callable[[Any, Any, Tensor], Tensor]


class Block(nn.Module):
    """Uses its weight twice."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4)) if weight is None else weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight


def called_twice(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.as_tensor((first(x) - first(x * 0.5)).square().mean() + second(x).mean())


def called_in_turn(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(second(first(first(first(x)))).square().sum())


def beside_eager_code(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(second(first(x)).square().mean() + first.weight.square().sum() * 0.1)


def with_tied_weights(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(second(first(x)).square().mean())


def of_several_sizes(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(first(x).square().mean() + first(x[:1]).mean() + second(x).mean())


def once_each(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(second(first(x)).square().mean())


def run(forward: Forward, *, captured: bool, fresh_gradients: bool) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    first = Block().to(DEVICE)
    second = Block(first.weight if forward is with_tied_weights else None).to(DEVICE)
    functions = [capture(block, gradients="accumulate") if captured else block for block in (first, second)]
    gradients = []
    for number in range(STEPS):
        if number == NOTICED or (fresh_gradients and number % 3 == 0):
            for parameter in (first.weight, second.weight):
                parameter.grad = None
        forward(functions[0], functions[1], inputs(number, 3, 4)).backward()
        if number >= NOTICED:
            gradients += [bits(first.weight.grad), bits(second.weight.grad)]
    return gradients, functions


@pytest.mark.one_in(9)
@pytest.mark.parametrize("fresh_gradients", [False, True])
@pytest.mark.parametrize(
    "forward", [called_twice, called_in_turn, beside_eager_code, with_tied_weights, of_several_sizes]
)
def test_shared_parameters_go_through_autograd(forward: Forward, fresh_gradients: bool) -> None:
    expected, _ = run(forward, captured=False, fresh_gradients=fresh_gradients)
    found, functions = run(forward, captured=True, fresh_gradients=fresh_gradients)
    assert found == expected
    told = [[finding.code for finding in recordings(function).findings] for function in functions]
    assert any("CG503" in codes for codes in told)
    assert recordings(functions[0]).replays >= STEPS


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fresh_gradients", [False, True])
def test_parameters_of_one_call_are_added_to_by_its_pass(fresh_gradients: bool) -> None:
    expected, _ = run(once_each, captured=False, fresh_gradients=fresh_gradients)
    found, functions = run(once_each, captured=True, fresh_gradients=fresh_gradients)
    assert found == expected
    assert not any(finding.code == "CG503" for function in functions for finding in recordings(function).findings)
