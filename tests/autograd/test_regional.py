"""Regional capture: forward and backward passes in any order, against an eager twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import (
    capture,
    mark_step_begin,
    recordings,
)
from capture.runtime import dispatch as _dispatch
from capture.runtime.captured import Captured
from tests.support.regions import STEPS, Block, Several, Wrapped, bits, both, captured_twins, inputs, replayed, twins
from tests.support.regions import fresh as fresh

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_blocks_in_an_eager_loop(optimizer: str, to_none: bool, marks: bool) -> None:
    mine, theirs = twins(lambda: nn.Sequential(Block(), Block(), Block()))
    for block in mine:
        capture(block)
    optimizers = {id(twin): OPTIMIZERS[optimizer](twin.parameters()) for twin in (mine, theirs)}

    def step(model: nn.Module, number: int) -> Tensor:
        if marks:
            mark_step_begin()
        optimizers[id(model)].zero_grad(set_to_none=to_none)
        loss: Tensor = model(inputs(number)).square().mean()
        loss.backward()
        optimizers[id(model)].step()
        return loss

    both(step, mine, theirs, 20)
    for block in mine:
        assert recordings(block).replays >= 20, recordings(block)
        assert recordings(block).recordings <= 4
        assert recordings(block).eager_calls == 0


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", ORDERS)
def test_several_forwards_and_backwards_in_any_order(order: tuple[int, ...]) -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        losses = [model.m[0](inputs(3 * number + i)).square().mean() for i in range(3)]
        for index in order:
            losses[index].backward()
        return losses

    both(step, mine, theirs)
    replayed(mine)


def test_forward_and_backward_passes_take_the_straight_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last steps no forward or backward pass goes through ``dispatch``, the long way of a call."""
    long_ways, earlier = list[int](), list[int]()
    whole = _dispatch.dispatch

    def counted(captured: Captured, values: Any, now: Any) -> Any:
        long_ways.append(captured.number)
        return whole(captured, values, now)

    monkeypatch.setattr(_dispatch, "dispatch", counted)
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        if number == STEPS - 2:
            earlier.extend(long_ways)
            long_ways.clear()
        model.zero_grad()
        x: Tensor = inputs(number)
        for block in model.m:
            x = block(x)
        x.square().mean().backward()
        return x

    both(step, mine, theirs)
    assert earlier
    assert not long_ways


def test_a_backward_after_the_next_forward() -> None:
    mine, theirs = captured_twins(Block)
    pending: dict[int, Tensor] = {}

    def step(model: Any, number: int) -> list[Tensor]:
        loss = model.m[0](inputs(number)).square().mean()
        before = pending.pop(id(model), None)
        if before is not None:
            before.backward()
        pending[id(model)] = loss
        return [loss]

    both(step, mine, theirs)
    replayed(mine)


def test_two_backwards_with_retain_graph() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](inputs(number)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    both(step, mine, theirs)
    replayed(mine)


def test_two_backwards_without_retain_graph_raise_what_eager_raises() -> None:
    mine, theirs = captured_twins(Block)
    for number in range(STEPS):
        errors = []
        for model in (theirs, mine):
            model.zero_grad()
            y = model.m[0](inputs(number))
            y.sum().backward()
            with pytest.raises(RuntimeError) as caught:
                y.sum().backward()
            errors.append((type(caught.value), str(caught.value)[:60]))
        assert errors[0] == errors[1]


def test_a_forward_whose_backward_never_comes() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        y: Tensor = model.m[0](inputs(number))
        if number % 3 == 2:
            y.sum().backward()
        return y

    both(step, mine, theirs, 12)
    pool = recordings(mine.m[0]).pool_bytes
    both(step, mine, theirs, 30)
    replayed(mine)
    assert recordings(mine.m[0]).pool_bytes == pool


def test_partial_gradients() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> list[Any]:
        block = model.m[0]
        x = inputs(number).requires_grad_()
        y = block(x)
        some = torch.autograd.grad(y.sum(), [x], retain_graph=True)
        others = torch.autograd.grad(y.sum(), [block.a.weight, block.b.bias])
        return [y, *some, *others]

    both(step, mine, theirs)
    replayed(mine)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", ["one", "two", "all", "none"])
def test_structures_unused_outputs_and_undefined_gradients(use: str) -> None:
    mine, theirs = captured_twins(Several)

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        out = model.m[0](inputs(number))
        assert out["more"][1][1:] == ("text", 3)
        assert out["more"][1][0] is out["one"]
        assert not out["best"].requires_grad
        assert not out["mean"].requires_grad
        losses = {"one": out["one"].sum(), "two": out["more"][0].prod(), "none": torch.zeros((), requires_grad=True)}
        losses["all"] = losses["one"] * losses["two"] + out["more"][1][0].square().sum()
        losses[use].backward()
        return [out["one"], out["more"][0], out["best"], out["mean"]]

    both(step, mine, theirs)
    if use != "none":
        replayed(mine)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # CG107 where one is an input
@pytest.mark.parametrize("inside", [True, False])
def test_zeros_without_memory(inside: bool) -> None:
    """Tensors of zeros without memory (``_efficientzerotensor``), which the backward pass of ``sgn`` makes, as
    gradients."""

    def body(x: Tensor) -> Tensor:
        return (x * 3).sgn() * 2 if inside else x * 3

    captured = capture(body)
    kept = capture(lambda x: x * 2 + 1)
    for seed in range(6):
        ours, theirs = (torch.arange(4.0).sub(seed).requires_grad_() for _ in range(2))
        (got,) = torch.autograd.grad((captured(ours) * ours).sgn().sum() + captured(ours).sum(), ours)
        (wanted,) = torch.autograd.grad((body(theirs) * theirs).sgn().sum() + body(theirs).sum(), theirs)
        assert torch.equal(got, wanted)
        (zero,) = torch.autograd.grad(captured(ours).sgn().sum(), ours)
        assert torch.equal(zero, torch.zeros(4))
        zero = torch.autograd.grad(theirs.sgn().sum(), theirs)[0] if seed % 2 else theirs.detach()
        assert torch.equal(kept(zero), zero * 2 + 1)


def test_gradients_that_are_not_contiguous_or_expanded() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        if number % 2:
            y.sum().backward()  # one number, expanded
        else:
            (y.t() * inputs(number, 6, 4)).sum().backward()
        return y

    both(step, mine, theirs, 14)
    replayed(mine)


class Squares(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * x)


@pytest.mark.parametrize("what", ["input", "output", "weight"])
def test_in_place_after_save_raises_what_eager_raises(what: str) -> None:
    mine, theirs = captured_twins(Block if what == "weight" else Squares)
    for number in range(STEPS):
        errors = []
        for model in (theirs, mine):
            leaf = inputs(number).requires_grad_()
            x = leaf * 1
            y = model.m[0](x)
            with torch.no_grad():
                {"input": x, "output": y, "weight": getattr(model.m[0], "b", nn.Linear(1, 1)).weight}[what].add_(1)
            with pytest.raises(RuntimeError) as caught:
                y.sum().backward()
            errors.append((type(caught.value), "modified by an inplace operation" in str(caught.value)))
        assert errors[0] == errors[1] == (RuntimeError, True)
    replayed(mine)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zero"])
def test_micro_batches_accumulate(to_none: bool) -> None:
    mine, theirs = captured_twins(Block)
    kept: dict[int, list[Tensor]] = {id(mine): [], id(theirs): []}

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad(set_to_none=to_none)
        for part in range(3):
            (model.m[0](inputs(3 * number + part)).square().mean() / 3).backward()
        kept[id(model)] += [p.grad for p in model.parameters()]
        return []

    both(step, mine, theirs)
    replayed(mine)
    assert [bits(grad) for grad in kept[id(mine)]] == [bits(grad) for grad in kept[id(theirs)]]


def test_gradients_kept_by_the_caller_keep_their_values() -> None:
    mine, theirs = captured_twins(Block)
    kept: dict[int, list[Any]] = {id(mine): [], id(theirs): []}

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        model.m[0](x).square().mean().backward()
        kept[id(model)] += [x.grad, *(p.grad for p in model.parameters())]
        return []

    both(step, mine, theirs, 12)
    replayed(mine)
    assert [bits(grad) for grad in kept[id(mine)]] == [bits(grad) for grad in kept[id(theirs)]]


def test_a_region_after_another() -> None:
    mine, theirs = captured_twins(Block, Block, lambda: nn.Linear(6, 2))

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        y: Tensor = model.m[2](model.m[1](model.m[0](inputs(number))))
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 10)
    replayed(mine, 10)
    assert recordings(mine.m[1]).recordings == 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
def test_a_region_called_twice_in_one_graph(marks: bool) -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        if marks:
            mark_step_begin()
        model.zero_grad()
        y: Tensor = model.m[0](model.m[0](inputs(number)))
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 10)
    replayed(mine)


def test_weights_shared_between_regions() -> None:
    weight = {}

    def step(model: Any, number: int) -> list[Tensor]:
        if id(model) not in weight:
            weight[id(model)] = [capture(lambda x: torch.tanh(x @ model.m[0].weight)),
                                 capture(lambda x: torch.relu(x @ model.m[0].weight.t()))]  # fmt: skip
        first, second = weight[id(model)]
        model.zero_grad()
        y = second(first(inputs(number)))
        y.square().mean().backward()
        return [y]

    mine, theirs = twins(lambda: Wrapped(nn.Linear(6, 6, bias=False)))
    both(step, mine, theirs)
    assert recordings(weight[id(mine)][0]).replays >= 3
