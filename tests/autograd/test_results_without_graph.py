"""Results that have no graph, or are leaves, beside results that belong to the caller's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
WEIGHT = nn.Parameter(torch.ones(3, 3))
BODIES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "data of an argument": lambda x: (x + 1, x.data),
    "argument detached": lambda x: (x * 2, x.detach(), x.detach()[0]),
    "data of a parameter": lambda x: (x @ WEIGHT, WEIGHT.data, WEIGHT.detach().mT),
}
LEAVES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "new leaf": lambda x: (x + 1, torch.zeros(3, requires_grad=True)),
    "leaf on an argument": lambda x: (x.detach().requires_grad_(), x.detach() * 2),
    "leaf of what was made": lambda x: ((x * 2).detach().requires_grad_(),),
    "parameter itself": lambda x: (x @ WEIGHT, WEIGHT),
    "parameter": lambda x: (nn.Parameter(x.detach() * 2), x + 1),
}


def told(results: tuple[Tensor, ...]) -> list[Any]:
    """Values of the results, and what autograd says of each."""
    return [(bits(one.detach()), one.requires_grad, one.is_leaf, type(one), one is WEIGHT) for one in results]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("needs", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", [*BODIES, *LEAVES])
def test_results_are_leaves_where_those_of_eager_are(name: str, needs: bool) -> None:
    body = BODIES.get(name) or LEAVES[name]
    captured = capture(body)
    for call in range(5):
        x, twin = (torch.full((3, 3), float(call), requires_grad=needs) for _ in range(2))
        mine, expected = captured(x), body(twin)
        assert told(mine) == told(expected), call
        for results in (mine, expected):
            WEIGHT.grad = None
            total = sum(tensor.sum() for tensor in results)
            if isinstance(total, Tensor) and total.requires_grad:
                total.backward()
        assert (x.grad is None) == (twin.grad is None), call
        if x.grad is not None and twin.grad is not None:
            assert torch.equal(x.grad, twin.grad), call
    assert name in LEAVES or recordings(captured).replays


def test_a_body_that_saves_a_sparse_tensor_is_part_of_the_callers_graph() -> None:
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
    weight = nn.Parameter(torch.ones(3, 2, device=DEVICE))

    def body(x: Tensor, values: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(indices, values, (3, 3), check_invariants=True).coalesce()
        y: Tensor = torch.sparse.mm(matrix, x @ weight)
        return y

    captured = capture(body)
    for call in range(5):
        x, values = torch.full((3, 3), call + 1.0), torch.arange(3.0)
        grads = []
        for run in (captured, body):
            weight.grad = None
            y = run(x, values)
            y.pow(2).sum().backward()
            grads.append((bits(y.detach()), bits(weight.grad)))
        assert grads[0] == grads[1], call


@pytest.mark.parametrize("is_part", [False, True])
def test_a_detached_result_beside_the_one_that_it_is_of(*, is_part: bool) -> None:
    weight = torch.full((4,), 1.5, device=DEVICE, requires_grad=True)

    def body(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = weight * x
        return y, {"seen": y.detach()[1:] if is_part else y.detach()}

    captured = capture(body)
    for number in range(8):
        x = torch.full((4,), float(number), device=DEVICE)
        told = []
        for function in (captured, body):
            weight.grad = None
            y, kept = function(x)
            seen = kept["seen"]
            assert not seen.requires_grad
            assert seen.is_leaf
            seen.add_(1)
            y.sum().backward()
            gradient: Any = weight.grad
            told.append([y.tolist(), seen.tolist(), gradient.tolist()])
        assert told[0] == told[1]
    assert recordings(captured).replays >= 4


def test_a_detached_result_on_an_attribute() -> None:
    """A detached result that the body keeps on an attribute, as hooks on layers do."""
    weight = torch.full((4,), 1.5, device=DEVICE, requires_grad=True)
    kept: dict[str, torch.Tensor] = {}

    def body(x: torch.Tensor) -> torch.Tensor:
        y = weight * x
        kept["y"] = y.detach()
        return y

    captured = capture(body)
    for number in range(8):
        x = torch.full((4,), float(number), device=DEVICE)
        told = []
        for function in (captured, body):
            weight.grad = None
            y, seen = function(x), kept["y"]
            assert not seen.requires_grad
            seen.add_(1)
            y.sum().backward()
            gradient: Any = weight.grad
            told.append([y.tolist(), seen.tolist(), gradient.tolist()])
        assert told[0] == told[1]
    assert recordings(captured).replays >= 4


def test_a_parameter_on_the_memory_of_a_result() -> None:
    weight = torch.full((4,), 1.5, device=DEVICE, requires_grad=True)

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = weight * x
        return y, nn.Parameter(y.detach(), requires_grad=False)

    captured = capture(body)
    for number in range(8):
        x = torch.full((4,), float(number), device=DEVICE)
        told = []
        for function in (captured, body):
            y, shown = function(x)
            told.append((y.tolist(), type(shown), shown.requires_grad, shown.tolist()))
        assert told[0] == told[1]
