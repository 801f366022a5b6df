"""Captured steps whose parameters ``swap_tensors`` exchanges, or whose gradient nodes get hooks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureError, capture, config, recordings
from tests.support.device import TAKES_KEPT_NODES, refuses_kept_nodes

CALLS = 12
Change = Callable[[nn.Linear, Any], object]


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    with config.patch(cache=False):
        yield


def steps(change: Change, kind: str, optimizer: str, *, captured: bool) -> tuple[list[Any], Any]:
    """Loss, weight and gradient of each call, with the change before the sixth; and the function."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    settings = getattr(torch.optim, optimizer)(net.parameters(), 0.1)

    def whole(x: Tensor) -> Tensor:
        settings.zero_grad()
        loss: Tensor = net(x).pow(2).sum()
        loss.backward()
        settings.step()
        return loss.detach()

    def part(x: Tensor) -> Tensor:
        total: Tensor = net(x).pow(2).sum()
        return total

    body: Any = whole if kind == "whole step" else part
    run = capture(body) if captured else body
    values: list[Any] = []
    kept = []
    for number in range(CALLS):
        if number == 5:
            kept.append(change(net, settings))
        if kind == "region":
            net.zero_grad()
        loss = run(torch.full((2, 3), number % 3 + 1.0, dtype=net.weight.dtype))
        if kind == "region":
            loss.backward()
        assert net.weight.grad is not None
        values += [loss.tolist(), net.weight.tolist(), net.weight.grad.tolist()]
        del loss
    return values, run


def swap(net: nn.Linear, _: Any) -> None:
    torch.utils.swap_tensors(net.weight, nn.Parameter(torch.full((3, 3), 0.5)))


def swap_both(net: nn.Linear, _: Any) -> None:
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.full_like(parameter, 0.25)))


def to_double(net: nn.Linear, settings: Any) -> None:
    settings.zero_grad()
    settings.state.clear()
    torch.__future__.set_swap_module_params_on_conversion(value=True)
    try:
        net.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(value=False)


def load(net: nn.Linear, _: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(value=True)
    try:
        net.load_state_dict({name: one + 1 for name, one in net.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(value=False)


def node_of(parameter: Tensor) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def before_it(net: nn.Linear, _: Any) -> Any:
    node = node_of(net.weight)
    node.register_prehook(lambda grads: (grads[0] * 2,))
    return node


def after_it(net: nn.Linear, _: Any) -> Any:
    def halve(*_: Any) -> None:
        assert net.bias.grad is not None
        net.bias.grad.mul_(0.5)

    node = node_of(net.bias)
    node.register_hook(halve)
    return node


@pytest.mark.one_in(9)
@refuses_kept_nodes  # the caller keeps nodes with hooks, which eager code made
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("kind", ["whole step", "region"])
@pytest.mark.parametrize("change", [swap, swap_both, to_double, load, before_it, after_it])
def test_a_step_does_what_eager_does(change: Change, kind: str, optimizer: str) -> None:
    eager, _ = steps(change, kind, optimizer, captured=False)
    found, run = steps(change, kind, optimizer, captured=True)
    assert found == eager
    if optimizer == "SGD" and (TAKES_KEPT_NODES or change not in (before_it, after_it)):
        assert recordings(run).replays > 0


@refuses_kept_nodes
def test_a_hook_that_is_removed_again_leaves_the_recording_of_before() -> None:
    def run(*, captured: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)

        def body(x: Tensor) -> Tensor:
            net.zero_grad()
            loss: Tensor = net(x).sum()
            loss.backward()
            return loss.detach()

        step, gradients, node = capture(body) if captured else body, [], node_of(net.weight)
        for number in range(CALLS):
            if number == 4:
                handle = node.register_prehook(lambda grads: (grads[0] * 3,))
            if number == 8:
                handle.remove()
            step(torch.full((2, 3), number + 1.0))
            assert net.weight.grad is not None
            gradients.append(net.weight.grad.tolist())
        return gradients, step

    gradients, step = run(captured=True)
    assert gradients == run(captured=False)[0]
    assert recordings(step).replays >= 4 or not TAKES_KEPT_NODES


def test_a_run_that_is_undone_leaves_nodes_and_their_hooks() -> None:
    """torch forgets a leaf's node at each ``set_``, even of the very memory that the leaf has."""
    net = nn.Linear(3, 1)
    node = before_it(net, None)

    @capture(fallback="error")
    def body(x: Tensor) -> Tensor:
        loss: Tensor = net(x).sum()
        loss.backward()
        with torch.no_grad():
            net.weight += random.random()
        return loss.detach()

    weight = net.weight.clone()
    with pytest.raises(CaptureError, match="CG202"):
        body(torch.ones(2, 3))
    assert torch.equal(net.weight, weight)
    assert node_of(net.weight) is node
    net(torch.ones(2, 3)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[4.0, 4.0, 4.0]]
