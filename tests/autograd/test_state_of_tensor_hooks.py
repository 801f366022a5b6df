"""Hooks on tensors and on nodes of autograd read Python state: a backward pass in the body sees it as it is now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define
from torch import Tensor, nn

from capture import capture, config, recordings
from tests.support.device import DEVICE, TAKES_KEPT_NODES, refuses_kept_nodes
from tests.support.training_twins import bits

CALLS = 14
Hook = Callable[[Any], Any]


@define
class Settings:
    """What a hook reads."""

    factor: float = 1.0
    apply: Callable[[Any, float], Any] = lambda value, factor: value

    def __call__(self, value: Any) -> Any:
        return self.apply(value, self.factor)


def attribute_of_a_cell(apply: Any, settings: Settings) -> Hook:
    return lambda value: apply(value, settings.factor)


def dict_in_a_cell(apply: Any, settings: Settings) -> Hook:
    table = {"settings": settings}
    return lambda value: apply(value, table["settings"].factor)


def bound_method(apply: Any, settings: Settings) -> Hook:
    settings.apply = apply
    return settings.__call__


def callable_object(apply: Any, settings: Settings) -> Hook:
    settings.apply = apply
    return settings


def partial(apply: Any, settings: Settings) -> Hook:
    return functools.partial(lambda own, value: apply(value, own.factor), settings)


def default(apply: Any, settings: Settings) -> Hook:
    def hook(value: Any, own: Settings = settings) -> Any:
        return apply(value, own.factor)

    return hook


def of_a_tensor(weight: Tensor, make: Any, settings: Settings) -> object:
    return weight.register_hook(make(lambda gradient, factor: gradient * factor, settings))


def after_accumulation(weight: Tensor, make: Any, settings: Settings) -> object:
    def apply(tensor: Tensor, factor: float) -> None:
        assert tensor.grad is not None
        tensor.grad.mul_(factor)

    return weight.register_post_accumulate_grad_hook(make(apply, settings))


def before_a_node(weight: Tensor, make: Any, settings: Settings) -> object:
    view = weight.expand_as(weight)
    assert view.grad_fn is not None
    node: Any = view.grad_fn.next_functions[0][0]
    return node, node.register_prehook(make(lambda gradients, factor: (gradients[0] * factor,), settings))


def run(wrap: Callable[[Any], Any], register: Any, make: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model, settings = nn.Linear(3, 2).to(DEVICE), Settings()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = register(model.weight, make, settings)

    def body(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, found = wrap(body), []
    for number in range(CALLS):
        settings.factor = 0.5 if number in (6, 10, 11) else 1.0
        loss = step(torch.full((2, 3), number / 8, device=DEVICE))
        found.append((bits(loss), bits(list(model.parameters()))))
    assert kept
    return found, step


@refuses_kept_nodes  # a node with a hook is kept, which eager code made
@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [attribute_of_a_cell, dict_in_a_cell, bound_method, callable_object, partial, default])
@pytest.mark.parametrize("register", [of_a_tensor, after_accumulation, before_a_node])
def test_what_hooks_read_is_as_it_is_now(register: Any, make: Any) -> None:
    with config.patch(cache=False), torch.enable_grad():
        expected, _ = run(lambda body: body, register, make)
        found, step = run(capture, register, make)
    assert found == expected
    assert recordings(step).replays or not (TAKES_KEPT_NODES or register is not before_a_node)
