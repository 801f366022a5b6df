"""Results that are arguments of the call, or lie on the memory of one, are built in C."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.python_calls import python_calls

shift = torch.arange(8.0)


def given_back(x: Tensor) -> tuple[Tensor, ...]:
    return x + shift, x, x[2:6], shift


def test_each_call_gets_its_own_arguments_back() -> None:
    captured = capture(given_back)
    for number in range(8):
        x = torch.full((8,), float(number))
        made, same, part, static = captured(x)
        assert torch.equal(made, x + shift)
        assert same is x
        assert static is shift
        assert part.data_ptr() == x[2:].data_ptr()
        part.fill_(-1.0)
        assert x.tolist() == [number, number, -1, -1, -1, -1, number, number]
    assert recordings(captured).replays >= 5


@pytest.mark.parametrize("grad", [False, True])
def test_views_need_gradients_as_those_of_eager_do(grad: bool) -> None:
    captured = capture(given_back)
    for _ in range(6):
        x = torch.ones(8, requires_grad=grad)
        with torch.no_grad():
            eager, results = given_back(x), captured(x)
        assert [one.requires_grad for one in results] == [one.requires_grad for one in eager]
        assert [one.grad_fn for one in results] == [one.grad_fn for one in eager]


def test_they_take_no_python_but_for_views() -> None:
    captured = capture(given_back)
    for _ in range(6):
        captured(torch.ones(8))
    calls = python_calls(lambda: captured(torch.ones(8))[0])
    assert not [name for name in calls if name.startswith(("Commit", "OutputPlan", "_GoesOn"))]


def test_the_gradient_of_a_residual_is_the_one_that_came() -> None:
    layer = torch.nn.Linear(8, 8)

    def eager(x: Tensor) -> Tensor:
        changed: Tensor = layer(x)
        return x + changed

    block = capture(eager)
    for number in range(8):
        found = []
        for function in (eager, block):
            layer.zero_grad()
            x = torch.full((2, 8), float(number), requires_grad=True)
            (function(x * 2) * 3).sum().backward()
            found.append([x.grad, *[parameter.grad for parameter in layer.parameters()]])
        assert all(map(torch.equal, *found))
    assert recordings(block).eager_calls == 0
