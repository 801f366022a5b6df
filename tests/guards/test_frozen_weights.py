"""Weights that are frozen and thawed between calls, as a discriminator's are for the step of its generator, tell calls
apart: both ways have recordings, and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, recordings
from capture.tree import thread_trees
from tests.support.observed import bits, x_of

Wrap = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """With gradients, unlike the fixture of the same name."""
    thread_trees.forget_trees()
    with config.patch(cache=False, silence={"CG103"}):
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for module in modules for one in module.parameters()]


def generator_and_discriminator(wrap: Wrap) -> tuple[Any, list[Any]]:
    torch.manual_seed(1)
    generator, discriminator, seen = nn.Linear(4, 4), wrap(net()), []
    for step in range(14):
        fake = generator(x_of(step))
        discriminator.requires_grad_(True)
        discriminator.zero_grad()
        (discriminator(fake.detach()).mean() - discriminator(x_of(step + 50)).mean()).backward()
        discriminator.requires_grad_(False)
        generator.zero_grad()
        discriminator(fake).mean().backward()
        seen.append(gradients(generator, discriminator))
        with torch.no_grad():
            for one in [*generator.parameters(), *discriminator.parameters()]:
                one.sub_(0.1 * one.grad)
    return discriminator, seen


def in_turn(wrap: Wrap) -> tuple[Any, list[Any]]:
    module, seen = wrap(net()), []
    for step in range(30):
        module.requires_grad_(step % 2 == 0)
        x = x_of(step).requires_grad_()
        module(x).sum().backward()
        seen.append([x.grad, *gradients(module)])
    return module, seen


def one_weight_in_turn(wrap: Wrap) -> tuple[Any, list[Any]]:
    module, seen = wrap(net()), []
    for step in range(30):
        module[0].weight.requires_grad_(step % 3 != 0)
        module(x_of(step)).sum().backward()
        seen.append(gradients(module))
    return module, seen


def thawed_one_by_one(wrap: Wrap) -> tuple[Any, list[Any]]:
    module, seen = wrap(net().requires_grad_(False)), []
    order = [module[2].bias, module[2].weight, module[0].bias, module[0].weight]
    for step in range(40):
        if step % 10 == 0:
            order[step // 10].requires_grad_(True)
        module(x_of(step)).sum().backward()
        seen.append(gradients(module))
    return module, seen


def frozen_and_replaced(wrap: Wrap) -> tuple[Any, list[Any]]:
    module, seen = wrap(net()), []
    for step in range(40):
        module[0].requires_grad_(step % 2 == 0)
        if step in (20, 21):
            module[0].weight = nn.Parameter(x_of(step, 5, 4), requires_grad=step == 21)
        module(x_of(step)).sum().backward()
        seen.append(gradients(module))
    return module, seen


def a_tensor_of_an_object(wrap: Wrap) -> tuple[Any, list[Any]]:
    class Scaled:
        def __init__(self) -> None:
            self.scale = x_of(3, 4).requires_grad_()

        def run(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.scale)

    holder, seen = Scaled(), []
    run = wrap(holder.run)
    for step in range(30):
        holder.scale.requires_grad_(step % 2 == 0)
        x = x_of(step).requires_grad_()
        run(x).sum().backward()
        seen.append([x.grad, None if holder.scale.grad is None else holder.scale.grad.clone()])
    return run, seen


def whole_steps(wrap: Wrap) -> tuple[Any, list[Any]]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step, seen = wrap(step), []
    for number in range(30):
        module[0].requires_grad_(number % 2 == 0)
        seen.append([step(x_of(number)), *module.state_dict().values(), *gradients(module)])
        seen[-1] = [None if one is None else one.clone() for one in seen[-1]]
    return step, seen


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "program",
    [generator_and_discriminator, in_turn, one_weight_in_turn, thawed_one_by_one, frozen_and_replaced,
     a_tensor_of_an_object, whole_steps],
)  # fmt: skip
def test_both_ways_replay(program: Callable[[Wrap], tuple[Any, list[Any]]]) -> None:
    _, expected = program(lambda body: body)
    captured, seen = program(capture)
    assert bits(seen) == bits(expected)
    counted = recordings(captured)
    assert counted.replays >= sum(counted.calls().values()) // 4, counted
