"""Hooks of leaves that the results used in a pass do not lead to: eager's pass does not come there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from tests.support.regions import Several, both, captured_twins, inputs, replayed
from tests.support.regions import fresh as fresh

Log = list[Any]


def on_gradients(parameter: Tensor, log: Log) -> Any:
    """A hook that cannot do with None."""

    def hook(grad: Tensor) -> Tensor:
        log.append(grad.shape)
        return grad * 2

    return parameter.register_hook(hook)


def after_accumulation(parameter: Tensor, log: Log) -> Any:
    """A hook that shows in the gradient how often it was run."""

    def double(leaf: Tensor) -> None:
        log.append(leaf.shape)
        assert leaf.grad is not None
        leaf.grad.mul_(2)

    return parameter.register_post_accumulate_grad_hook(double)


Register = Callable[[Tensor, Log], Any]
HOOKS = pytest.mark.parametrize("register", [on_gradients, after_accumulation])


class Shared(nn.Module):
    """One result of ``a``, one of ``a`` and ``b``, and one of ``x`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.a(x))
        return h * 2, self.b(h).sin(), x * 3


def assert_same_hooks(one: Log, other: Log) -> None:
    """As often, not in the same order: hooks of different parameters run in another one."""
    assert sorted(map(str, one)) == sorted(map(str, other))


def twins_with_hooks(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any, dict[int, Log]]:
    mine, theirs = captured_twins(make, **options)
    return mine, theirs, {id(mine): [], id(theirs): []}


def twins_with_every_leaf_hooked(register: Register) -> tuple[Any, Any, dict[int, Log]]:
    mine, theirs, logs = twins_with_hooks(Shared)
    for model in (mine, theirs):
        for parameter in model.parameters():
            register(parameter, logs[id(model)])
    return mine, theirs, logs


@pytest.mark.parametrize("begin", [0, 4])
@pytest.mark.parametrize("clears", [True, False])
@HOOKS
def test_hooks_of_parameters(register: Register, begin: int, clears: bool) -> None:
    mine, theirs, logs = twins_with_hooks(Shared)

    def step(model: Any, number: int) -> list[Tensor]:
        if number == begin:
            for parameter in model.parameters():
                register(parameter, logs[id(model)])
        if clears:
            model.zero_grad()
        x = inputs(number).requires_grad_()
        results = model.m[0](x)
        results[number % 3].square().sum().backward(retain_graph=True)
        if number % 4 == 3:
            (results[0].sum() + results[2].sum()).backward()
        assert x.grad is not None
        return [x.grad, *[result.detach() for result in results]]

    both(step, mine, theirs, 14)
    replayed(mine)
    assert_same_hooks(logs[id(mine)], logs[id(theirs)])


@HOOKS
def test_hooks_with_accumulation_in_the_recording(register: Register) -> None:
    mine, theirs, logs = twins_with_hooks(Several, gradients="accumulate")

    def step(model: Any, number: int) -> Tensor:
        if number == 4:
            for parameter in model.parameters():
                register(parameter, logs[id(model)])
        out = model.m[0](inputs(number))
        loss: Tensor = out["one" if number % 3 == 0 else "more"][0].sum()
        loss.backward()
        return loss

    both(step, mine, theirs, 10)
    replayed(mine)
    assert_same_hooks(logs[id(mine)], logs[id(theirs)])


@HOOKS
def test_hooks_of_arguments(register: Register) -> None:
    mine, theirs, logs = twins_with_hooks(Shared)

    def step(model: Any, number: int) -> list[Tensor]:
        model.m[0].requires_grad_(number >= 6)
        results = model.m[0](inputs(number).requires_grad_() if number < 6 else inputs(number))
        if number >= 6:
            register(model.m[0].b.weight, logs[id(model)]).remove()
            register(model.m[0].b.bias, logs[id(model)])
        results[0].sum().backward()
        return [*results[:2]]

    both(step, mine, theirs, 12)
    assert logs[id(mine)] == logs[id(theirs)] == []


@HOOKS
def test_other_code_in_the_same_pass_reaches_the_leaf(register: Register) -> None:
    mine, theirs, logs = twins_with_every_leaf_hooked(register)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](inputs(number))[0].sum()
        if number % 2:
            loss = loss + (model.m[0].b.weight ** 2).sum()
        loss.backward()
        return loss

    both(step, mine, theirs, 10)
    replayed(mine)
    assert_same_hooks(logs[id(mine)], logs[id(theirs)])
    assert torch.Size([6, 6]) in logs[id(mine)]


@pytest.mark.filterwarnings("ignore:CG501")
@HOOKS
def test_passes_for_gradients_of_gradients(register: Register) -> None:
    mine, theirs, logs = twins_with_every_leaf_hooked(register)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        results = model.m[0](x)
        if number < 6:
            results[0].sum().backward()
            return x
        (grad,) = torch.autograd.grad(results[0].sum(), x, create_graph=True)
        grad.square().sum().backward()
        return grad

    both(step, mine, theirs, 8)
    replayed(mine)
    assert_same_hooks(logs[id(mine)], logs[id(theirs)])


@pytest.mark.parametrize("raises", [False, True])
def test_hooks_are_as_they_were_afterwards(raises: bool) -> None:
    mine, _, logs = twins_with_hooks(Shared)
    for number in range(8):
        results = mine.m[0](inputs(number).requires_grad_())
        (results[0].sum() + results[1].sum()).backward()
    weight, log = mine.m[0].b.weight, logs[id(mine)]
    handle, after = on_gradients(weight, log), after_accumulation(weight, log)
    before = [*weight._backward_hooks.values(), *weight._post_accumulate_grad_hooks.values()]
    x = inputs(9).requires_grad_()
    if raises:
        x.register_hook(_refuse)
    results = mine.m[0](x)
    try:
        results[0].sum().backward()
    except ValueError:
        assert raises
    assert not log
    if not raises:
        assert [*weight._backward_hooks.values(), *weight._post_accumulate_grad_hooks.values()] == before
    mine.m[0](inputs(10))[1].sum().backward()
    assert len(log) == 2
    handle.remove()
    after.remove()
    mine.m[0](inputs(11))[1].sum().backward()
    assert len(log) == 2


def _refuse(_: Tensor) -> Tensor:
    raise ValueError


class NoGradient(torch.autograd.Function):
    """Says that there is no gradient for its second input."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Given(nn.Module):
    """Two results, of which one leads to ``w`` through a function that gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made: Tensor = NoGradient.apply(x, self.w)  # type: ignore[no-untyped-call]
        return made * self.v, x * self.v


@pytest.mark.parametrize("used", [0, 1])
def test_a_reached_leaf_without_a_gradient(used: Literal[0, 1]) -> None:
    """Eager runs its hooks with None."""
    mine, theirs, logs = twins_with_hooks(Given)

    def step(model: Any, number: int) -> Tensor:
        if number == 4:
            model.m[0].w.register_hook(logs[id(model)].append)
        loss: Tensor = model.m[0](inputs(number))[used].sum()
        loss.backward()
        return loss

    both(step, mine, theirs, 8)
    assert logs[id(mine)] == logs[id(theirs)] == [None] * (4 * (used == 0))


def test_an_optimizer_in_the_backward_pass() -> None:
    """Two losses of one call, each with its own part of the weights, and steps as soon as there is a gradient."""
    mine, theirs, _ = twins_with_hooks(Several)

    def take_step(leaf: Tensor) -> None:
        assert leaf.grad is not None
        with torch.no_grad():
            leaf.sub_(leaf.grad, alpha=0.1)

    for model in (mine, theirs):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(take_step)

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        out = model.m[0](inputs(number))
        losses = [out["one"].square().sum(), out["more"][0].square().sum()]
        for loss in losses:
            loss.backward()
        return losses

    both(step, mine, theirs, 12)
    replayed(mine)
