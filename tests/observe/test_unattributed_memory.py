"""Memory that a body made although no operator told so is known by who holds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, config
from capture.observe.trace import External
from capture.observe.unattributed_memory import UnattributedMemory
from capture.state.snapshot import Snapshot
from capture.tree import thread_trees
from tests.support.device import DEVICE


class Times(torch.autograd.Function):
    """A product by a user's function, which saves both."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * x


class Kept(torch.autograd.Function):
    """Makes its result itself and saves it."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.randn_like(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0]


class RecordedWith(torch.autograd.Function):
    """Makes its result itself and saves nothing."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.randn_like(x)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def by_function(x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = Times.apply(x, y)  # type: ignore[no-untyped-call]
    return result


def freed(x: Tensor, y: Tensor) -> Tensor:
    product = by_function(x, y) * y
    product.sum().backward()
    return product


def across(x: Tensor, view: Tensor) -> Tensor:
    return x.view(2, 2) * (x.view(2, 2) @ view) @ view.t()


LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing saved": lambda x, y: x + y, "saved": lambda x, y: x * y, "saved twice": lambda x, y: x * y * y,
    "by a function": by_function, "freed": freed, "alone": lambda x, y: (x * 1).detach(),
    "handed on": lambda x, y: y, "in a list": lambda x, y: torch.stack([x, y]).prod(0),
    "as a view": lambda x, y: x.view(2, 2) @ y.view(2, 2), "as two views": lambda x, y: across(x, y.view(2, 2)),
    "as a view and whole": lambda x, y: across(x * y, y.view(2, 2)), "a view twice": lambda x, y: x[1:] * y[1:] * y[1:],
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.parametrize("holds", ["nobody", "the tensor", "a view", "an alias"])
@pytest.mark.parametrize("graph", ["none", "own", "saved", "exp"])
def test_who_holds_it(kind: str, holds: str, graph: str) -> None:
    made, x = torch.randn(4), torch.randn(4, requires_grad=True)
    with torch.enable_grad():  # as what comes out of a compiled function has a graph
        result = x.exp() if graph == "exp" else (Kept if graph == "saved" else RecordedWith).apply(x)  # type: ignore[no-untyped-call]
    if graph != "none":
        made = result.detach() if kind == "freed" else result
    del result
    with torch.enable_grad():
        left = LEFT[kind](x, made)
    kept = {"nobody": None, "the tensor": made, "a view": made[1:], "an alias": made.detach()}[holds]
    external = External(made.detach(), made.untyped_storage(), None)
    del made
    is_unattributed = external in UnattributedMemory(Snapshot(), [left])
    assert is_unattributed == (holds == "nobody" or kind == "handed on")
    del kept
    assert external in UnattributedMemory(Snapshot(), [left])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_tensors_that_only_an_iterator_has(grad: bool) -> None:
    """They belong to the iterator, also where the result's graph has saved them."""
    thread_trees.forget_trees()

    def tables() -> Any:
        return itertools.cycle([torch.full((4,), float(number), device=DEVICE) for number in range(1, 4)])

    ours, theirs = tables(), tables()
    captured = capture(lambda x: x * next(ours))
    with torch.set_grad_enabled(grad), config.patch(cache=False):
        for step in range(9):
            x = torch.full((4,), step + 1.0, device=DEVICE, requires_grad=grad)
            assert torch.equal(captured(x), x * next(theirs)), step
