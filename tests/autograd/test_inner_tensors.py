"""What a region keeps for its backward pass alone: replays write there again once nobody has it, whoever got it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, mark_step_begin, recordings
from tests.support.observed import bits
from tests.support.training_twins import data

Gradients = Literal["autograd", "accumulate"]
KEPT: list[Tensor] = []


class _GivesSaved(torch.autograd.Function):
    """The gradient is a tensor that the forward pass saved."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inner = x * 3
        ctx.save_for_backward(inner)
        return inner.sin()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inner,) = ctx.saved_tensors
        return inner


class _GivesView(_GivesSaved):
    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inner,) = ctx.saved_tensors
        return inner.t().t()


class _KeepsSaved(_GivesSaved):
    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inner,) = ctx.saved_tensors
        KEPT.append(inner.view(-1))
        return grad * inner


class Block(nn.Module):
    def __init__(self, function: Callable[..., Any] | None) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x).tanh()
        if self.function is not None:
            y = self.function(y)
        result: Tensor = self.second(y).sigmoid() * y
        return result


def differentiated(y: Tensor, block: nn.Module, x: Tensor, *, again: bool = False) -> tuple[Any, ...]:
    """The gradients, which are nobody else's from now on."""
    y.sum().backward(retain_graph=again)
    found = (x.grad, *[parameter.grad for parameter in block.parameters()])
    x.grad = None
    block.zero_grad()
    return found


def plain(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    kept.append(differentiated(block(x), block, x))


def twice(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    y = block(x)
    kept.append(differentiated(y, block, x, again=True))
    kept.append(differentiated(y, block, x))


def graph_of_gradients(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    (gradient,) = torch.autograd.grad(block(x).sum(), [x], create_graph=True)
    kept.append(gradient)
    kept.append(torch.autograd.grad((gradient * gradient).sum(), list(block.parameters()), allow_unused=True))


def with_anomalies_looked_for(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        kept.append(differentiated(block(x), block, x))


def batch_of_gradients(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    y = block(x)
    seeds = torch.eye(2).repeat(1, y.numel() // 2).view(2, *y.shape)
    kept.append(torch.autograd.grad(y, [x], seeds, is_grads_batched=True))


def pending(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    first, second = block(x), block(x * 2)
    kept.append(differentiated(first, block, x))
    kept.append(differentiated(second, block, x))


def left_unused(block: nn.Module, x: Tensor, kept: list[Any]) -> None:
    kept.append(block(x))  # with its graph


WAYS = (twice, graph_of_gradients, with_anomalies_looked_for, batch_of_gradients, pending, left_unused)
CHOOSE_INPUTS = (graph_of_gradients, batch_of_gradients)
"""Do not reach parameters whose gradients a graph adds up."""
CASES = [
    (way, mode)
    for way in WAYS
    for mode in ("autograd", "accumulate")
    if (way, mode) not in [(one, "accumulate") for one in CHOOSE_INPUTS]
]


def run(block: nn.Module, turns: list[Callable[..., None]]) -> tuple[list[Any], list[Tensor]]:
    kept: list[Any] = []
    KEPT.clear()
    for number, turn in enumerate(turns):
        mark_step_begin()
        x = data(number)[:, :4].clone().requires_grad_()
        turn(block, x, kept)
        if number > 12:
            kept.pop(0)
    return [bits(list(kept)), bits(list(KEPT))], list(KEPT)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("way", "gradients"), CASES, ids=[f"{way.__name__}-{gradients}" for way, gradients in CASES])
@pytest.mark.parametrize("function", [None, _GivesSaved, _GivesView, _KeepsSaved], ids=lambda f: f and f.__name__)
@pytest.mark.filterwarnings("ignore")
def test_what_was_kept_of_earlier_passes(
    function: Any, way: Callable[..., None], gradients: Gradients
) -> None:  # fmt: skip
    """A pass of this way comes after replays, and after it replays go on; all that it gave is as eager's."""
    if (function, way) == (_KeepsSaved, graph_of_gradients):
        way = twice  # a graph of gradients runs the body's backward pass again, with what its Python does
    turns = [plain] * 5 + [way] + [plain] * 3 + [way, plain, way] + [plain] * 8
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        block = Block(None if function is None else function.apply)
        if captured:
            capture(block, gradients=gradients)
        with config.patch(drop_slow=False):
            found.append(run(block, turns)[0])
    assert found[0] == found[1]
    if function is None and way not in (graph_of_gradients, left_unused):
        assert recordings(block).replays > 8, recordings(block)
