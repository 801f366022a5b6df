"""``gradients="accumulate"``: backward recordings that put gradients of parameters into ``.grad`` themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from capture.autograd import accumulate_grad
from capture.autograd.accumulate_grad import ChosenInputsError
from tests.support.accumulating import STEPS, World, compare, data, replays
from tests.support.device import DEVICE
from tests.support.regions import Block, bits
from tests.support.regions import fresh as fresh


def blocks() -> nn.ModuleList:
    return nn.ModuleList([Block(), Block(drop=0.1)])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_steps_and_micro_batches(to_none: bool, micro: int) -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad(set_to_none=to_none)
        for number in range(micro):
            world.run(data(10 * step + number)).square().mean().backward()
        world.optimizer.step()

    ours = compare(blocks, act)
    assert replays(ours) >= 2 * micro * (STEPS - 5)
    assert all(recordings(module).eager_calls == 0 for module in ours.modules)


def test_gradients_that_are_held_once_as_a_step_begins() -> None:
    """Gradients from before the step keep their memory as long as nothing else is written there. In the middle of
    training another function runs while they are held."""
    between = capture(torch.relu)

    def act(world: World, step: int) -> None:
        if world.captured and step == STEPS // 2:
            between(data(step))
            mark_step_begin()
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        world.optimizer.step()

    ours = compare(blocks, act, 2 * STEPS)
    assert all(recordings(module).eager_calls == 0 for module in ours.modules)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("marks", [True, False])
def test_gradients_that_every_step_begins_with(marks: bool) -> None:
    """Gradients that are zeroed only after the forward pass are held as each step begins: they get memory of their
    own."""

    def act(world: World, step: int) -> None:
        loss = world.run(data(step)).square().mean()
        world.optimizer.zero_grad()
        loss.backward()
        world.optimizer.step()

    ours = compare(blocks, act, 2 * STEPS, marks=marks)
    kept = sum(recordings(module).kept_outputs for module in ours.modules)
    assert 0 < kept <= 3 * sum(1 for _ in ours.modules.parameters())
    assert all(recordings(module).eager_calls == 0 for module in ours.modules)


LEFT: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda g: None,
    "an attribute": lambda g: setattr(g, "note", 1),
    "a gradient": lambda g: setattr(g, "grad", torch.ones_like(g)),
    "a hook": lambda g: g.requires_grad_().register_hook(lambda one: one),
    "a requirement": lambda g: g.requires_grad_(),
    "another shape": lambda g: g.t_(),
    "other memory": lambda g: setattr(g, "data", torch.ones_like(g)),
    "another class": lambda g: setattr(g, "__class__", nn.Parameter),
    "other values": lambda g: g.mul_(2),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("left", LEFT)
def test_what_is_left_on_a_gradient_is_gone_with_it(left: str) -> None:
    """The gradient may be the same tensor object as in the step before, since nobody holds it: what code left on that
    object must not be seen in the next step."""

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        world.optimizer.step()
        gradient = world.modules[0].a.weight.grad  # type: ignore[union-attr]
        assert isinstance(gradient, Tensor)
        asked = (
            gradient.grad is None,
            gradient.requires_grad,
            gradient.is_leaf,
            type(gradient),
            gradient.__dict__.copy(),
        )
        world.kept.append(str((*asked, gradient.shape, gradient._backward_hooks)))
        LEFT[left](gradient)

    ours = compare(blocks, act, 2 * STEPS)
    assert all(recordings(module).eager_calls == 0 for module in ours.modules)


def test_weak_references_to_a_gradient_end_with_it() -> None:
    """A weak reference is dead, and its callback has run, at the latest when the next gradient exists."""

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        world.kept += [reference() is None for reference in world.watched]
        world.watched = [
            weakref.ref(parameter.grad) for parameter in world.modules.parameters() if parameter.grad is not None
        ]
        if step % 3 == 0:
            world.watched.append(world.watched[0])
        if step % 4 == 0:
            world.watched = [weakref.ref(old(), lambda _: world.kept.append("gone")) for old in world.watched]  # type: ignore[arg-type]

    compare(blocks, act, 2 * STEPS)


def test_gradients_between_two_regions_may_be_kept() -> None:
    """The first region reads the gradient that the second one wrote, without a copy. Hooks and ``retain_grad`` on the
    tensor between the two see it as well."""

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        first, second = world.modules
        x = first(data(step))
        if step % 3 == 0:
            x.register_hook(world.kept.append)
        elif step % 3 == 1:
            x.retain_grad()
        second(x).square().mean().backward()
        world.kept += [x.grad] if step % 3 == 1 else []
        del world.kept[:-5]
        world.optimizer.step()

    ours = compare(blocks, act, steps=20)
    assert replays(ours) >= 2 * 20


def test_a_region_gets_the_gradient_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    clone = Tensor.clone

    def copy_of(tensor: Tensor, **given: Any) -> Tensor:
        copies.append(tensor)
        return clone(tensor, **given)

    monkeypatch.setattr(Tensor, "clone", copy_of)

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        copies.clear()
        world.run(data(step).requires_grad_()).square().mean().backward()
        if world.captured and step == STEPS - 1:
            assert len(copies) == 2  # for the leaf, which the first block uses twice
        copies.clear()

    compare(blocks, act)


def test_gradients_come_to_the_same_place_again() -> None:
    places = []

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        if world.captured:
            places.append([one.grad.data_ptr() for one in world.modules.parameters() if one.grad is not None])

    compare(blocks, act)
    assert places[-1] == places[-2] == places[-3]


def test_gradients_that_are_held_keep_their_values() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        world.kept += [one.grad for one in world.modules.parameters()]
        world.optimizer.step()

    compare(blocks, act)


def test_several_forwards_before_their_backwards() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        losses = [world.run(data(10 * step + number)).square().mean() for number in range(2)]
        for loss in reversed(losses) if step % 2 else losses:
            loss.backward()
        world.optimizer.step()

    compare(blocks, act)


def test_a_second_pass_through_a_graph() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        loss = world.run(data(step)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        world.optimizer.step()

    compare(blocks, act)


def test_hooks_run() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        first, *_, last = world.modules.parameters()
        loss = world.run(data(step)).square().mean()
        hooks = []
        if step in (4, 6):
            hooks = [first.register_hook(lambda grad: grad * 0.5)]
            hooks += [last.register_post_accumulate_grad_hook(lambda leaf: world.kept.append(leaf.grad.clone()))]
        loss.backward()
        for hook in hooks:
            hook.remove()
        world.optimizer.step()

    ours = compare(blocks, act, steps=9)
    assert len(ours.kept) == 2


def test_an_argument_that_needs_gradients_and_one_that_does_not() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        x = data(step).requires_grad_(step % 2 == 0)
        world.run(x * 1 if step % 4 == 0 else x).square().mean().backward()
        world.kept.append(x.grad)
        world.optimizer.step()

    compare(blocks, act, steps=10)


class Odd(nn.Module):
    """A module whose gradients are broadcast, transposed, shared by two parameters, or missing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6)) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(6, 6).t())
        self.unused, self.frozen = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.wide + (self.a + self.b)) * self.frozen + self.c.expand_as(x) + self.scalar
        result: Tensor = y + (self.c * 0 + self.c.sum())
        return result


@pytest.mark.one_in(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_odd_gradients(to_none: bool) -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad(set_to_none=to_none)
        y = world.run(data(step))
        (y.sum() if step % 2 else y.square().sum()).backward()
        world.optimizer.step()

    ours = compare(lambda: nn.ModuleList([Odd(), Odd()]), act)
    assert replays(ours)


def test_sparse_gradients() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 6, sparse=True)

        @override
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.table(x.long().abs() % 10)
            return found

    def act(world: World, step: int) -> None:
        for one in world.modules.parameters():
            one.grad = None
        for number in range(2):
            world.run(data(step, 4) * 5 + number).square().sum().backward()
        world.kept += [one.grad.to_dense() for one in world.modules.parameters() if one.grad is not None]
        for one in world.modules.parameters():
            one.grad = None

    compare(lambda: nn.ModuleList([Table()]), act)


def test_a_weight_of_two_modules() -> None:
    def make() -> nn.ModuleList:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight = first.weight
        return nn.ModuleList([first, second])

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        world.optimizer.step()

    compare(make, act)


def test_parameters_replaced_frozen_and_moved() -> None:
    def act(world: World, step: int) -> None:
        linear = world.modules[0]
        assert isinstance(linear, nn.Linear)
        if step == 4:
            linear.weight = nn.Parameter(linear.weight.detach() * 2)
        if step in (6, 7):
            linear.bias.requires_grad_(step == 7)
        if step == 9:
            linear.weight.data = linear.weight.detach().clone()
        for parameter in world.modules.parameters():
            parameter.grad = None
        world.run(data(step)).square().mean().backward()
        with torch.no_grad():
            for parameter in world.modules.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)

    compare(lambda: nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), act, steps=12)


@pytest.mark.parametrize("hooked", [False, True])
def test_parameters_frozen_before_the_backward_pass(hooked: bool) -> None:
    """What is frozen when a pass comes to it gets no gradient, whatever the forward pass began with."""

    def act(world: World, step: int) -> None:
        linear = world.modules[0]
        assert isinstance(linear, nn.Linear)
        if hooked and step == 0:
            linear.weight.register_hook(lambda gradient: gradient * 2)
        world.optimizer.zero_grad(set_to_none=step % 2 == 0)
        out = world.run(data(step))
        linear.weight.requires_grad_(step not in (1, 4, 5))
        linear.bias.requires_grad_(step != 5)
        out.square().mean().backward()
        linear.requires_grad_(step != 5)
        world.optimizer.step()

    compare(lambda: nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), act, steps=12)


def test_gradient_replaced_between_micro_batches() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        for number in range(3):
            world.run(data(10 * step + number)).square().mean().backward()
            for one in world.modules.parameters():
                if number == 1 and one.grad is not None:
                    one.grad = one.grad * 0.5
        world.optimizer.step()

    compare(blocks, act)


def test_inference_and_training_in_turn() -> None:
    def act(world: World, step: int) -> None:
        if step % 3 == 2:
            with torch.no_grad():
                world.kept.append(world.run(data(step)))
            return
        world.optimizer.zero_grad()
        F.mse_loss(world.run(data(step)), data(step + 1)).backward()
        world.optimizer.step()

    compare(blocks, act, steps=11)


PASSES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "grad": lambda loss, x, _: torch.autograd.grad(loss, x),
    "inputs": lambda loss, x, _: loss.backward(inputs=[x]),
    "both": lambda loss, x, weight: loss.backward(inputs=[x, weight]),
}


@pytest.mark.parametrize("how", PASSES)
def test_passes_for_chosen_inputs_raise(how: str) -> None:
    linear = capture(nn.Linear(6, 6).to(DEVICE), gradients="accumulate")
    for step in range(4):
        mark_step_begin()
        x = data(step).requires_grad_()
        loss = linear(x).square().mean()
        if step < 2:
            loss.backward()
            continue
        before = bits(linear.weight.grad)
        with pytest.raises(ChosenInputsError, match='gradients="autograd"'):
            PASSES[how](loss, x, linear.weight)
        assert bits(linear.weight.grad) == before
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(linear(x).sum(), linear.weight)


def test_a_pass_on_another_stream_gives_the_anchor_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pass runs on another stream the anchor gets a number as its gradient, so that autograd has the streams
    wait for each other; the number reaches no parameter."""
    numbers = iter(range(1000))
    monkeypatch.setattr(accumulate_grad, "stream_reader", lambda device: lambda: next(numbers))

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        world.run(data(step)).square().mean().backward()
        world.optimizer.step()

    assert replays(compare(blocks, act))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("why", ["a process group", "torch does not tell"])
def test_autograd_delivers_where_it_has_to(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "a process group":
        monkeypatch.setattr(accumulate_grad, "groups_exist", lambda: True)
    else:
        monkeypatch.setattr(accumulate_grad, "will_execute", None)

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        loss = world.run(data(step)).square().mean()
        world.kept += torch.autograd.grad(loss, list(world.modules.parameters()), retain_graph=True)
        loss.backward()
        world.optimizer.step()

    assert replays(compare(blocks, act))


def test_a_backward_pass_that_stays_eager() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @override
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * (2.0 if grads[0].sum().item() < 1e9 else 1.0)

    class Reader(nn.Linear):
        @override
        def forward(self, input: Tensor) -> Tensor:
            result: Tensor = Reads.apply(super().forward(input))  # type: ignore[no-untyped-call]
            return result

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad(set_to_none=step % 2 == 0)
        world.run(data(step)).square().mean().backward()
        world.optimizer.step()

    compare(lambda: nn.ModuleList([Reader(6, 6)]), act)


def test_an_error_in_the_pass_leaves_gradients_alone() -> None:
    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        y = world.run(data(step))
        if step == 5:
            y.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                y.square().mean().backward()
            return
        y.square().mean().backward()
        world.optimizer.step()

    compare(blocks, act)


def test_pending_passes_across_steps() -> None:
    pending: dict[bool, list[Tensor]] = {True: [], False: []}

    def act(world: World, step: int) -> None:
        world.optimizer.zero_grad()
        waiting = pending[world.captured]
        waiting.append(world.run(data(step)).square().mean())
        if len(waiting) > 2:
            waiting.pop(0).backward()

    compare(blocks, act, steps=10)
