"""Users' functions that run code anew in their backward pass, and differentiate it: adjoint methods, fixed points,
blocks that keep their inputs alone. Where nodes of leaves belong to streams, what the function saved and what the code
finds in its module have to be one leaf there (``leaf_swap.SavedLeaves``)."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from capture.autograd.leaf_swap import SavedLeaves
from capture.autograd.saved_graph import GraphSaver
from tests.autograd.test_leaf_swap import another_thread, on_a_device
from tests.support.device import DEVICE
from tests.support.regions import both, inputs, twins
from tests.support.regions import fresh as fresh

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
Differentiate = Callable[[Tensor, Tensor, tuple[Tensor, ...], Any, Tensor], tuple[Any, ...]]


@pytest.fixture(params=["as the device is", "as one with streams"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as one with streams":
        on_a_device(monkeypatch)


def by_saved(out: Tensor, x: Tensor, saved: tuple[Tensor, ...], _: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(out, (x, *saved), grad)


def by_module(out: Tensor, x: Tensor, _: tuple[Tensor, ...], field: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(out, (x, *field.parameters()), grad)


def by_some(out: Tensor, x: Tensor, saved: tuple[Tensor, ...], _: Any, grad: Tensor) -> tuple[Any, ...]:
    """Only the last one is asked for, and one to which nothing leads."""
    found = torch.autograd.grad(out, (x, saved[-1], torch.zeros_like(x, requires_grad=True)), grad, allow_unused=True)
    return found[0], *[None] * (len(saved) - 1), found[1]


def by_scaling(out: Tensor, x: Tensor, saved: tuple[Tensor, ...], field: Any, grad: Tensor) -> tuple[Any, ...]:
    """It writes what it counts in the module, and looks at the parameters by their objects."""
    field.passes += 1
    known = dict.fromkeys(field.parameters(), 2.0)
    found = torch.autograd.grad(out, (x, *saved), grad)
    return found[0], *[one * known[mine] for one, mine in zip(found[1:], field.parameters(), strict=True)]


WAYS: dict[str, Differentiate] = {
    "what it saved": by_saved,
    "the module's": by_module,
    "some": by_some,
    "by object": by_scaling,
}


class Again(torch.autograd.Function):
    """Runs the module without a graph, and once more with one as its gradients are asked for."""

    @staticmethod
    @override
    def forward(ctx: Any, field: nn.Module, way: str, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.field, ctx.way = field, way
        with torch.no_grad():
            out: Tensor = field(x)
        ctx.save_for_backward(x, *weights)
        return out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Any) -> Any:
        x, *saved = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.field(x)
            return (None, None, *WAYS[ctx.way](out, x, tuple(saved), ctx.field, grad))


class Scaled(torch.autograd.Function):
    """Gets a parameter below all functions of torch."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @override
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Field(nn.Module):
    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.scale = nn.Parameter(torch.ones(6))
        self.nested, self.passes = nested, 0

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        out: Tensor = Scaled.apply(y, self.scale) if self.nested else y * self.scale  # type: ignore[no-untyped-call]
        return out


class Model(nn.Module):
    def __init__(self, way: str = "what it saved", nested: bool = False) -> None:
        super().__init__()
        self.field, self.head, self.way = Field(nested), nn.Linear(6, 6), way

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.head(x))
        out: Tensor = Again.apply(self.field, self.way, y, *self.field.parameters())  # type: ignore[no-untyped-call]
        return torch.tanh(out)


def step(model: Any, number: int) -> list[Any]:
    model.zero_grad()
    loss = model(inputs(number, 3, 6)).square().mean()
    loss.backward()
    with torch.no_grad():
        for one in model.parameters():
            if one.grad is not None:
                one.sub_(one.grad * 0.1)
    return [loss, model.field.passes]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_it_differentiates_what_it_runs_again(way: str, nested: bool, streams: None) -> None:
    mine, theirs = twins(lambda: Model(way, nested))
    capture(mine)
    both(step, mine, theirs)
    assert recordings(mine).replays >= 4


def test_beside_another_thread_that_begins_between_both_passes(streams: None) -> None:
    mine, theirs = twins(Model)
    capture(mine)

    def beside(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        loss = model(inputs(number, 3, 6)).square().mean()
        with another_thread() if number % 2 else contextlib.nullcontext():
            loss.backward()
        return [loss]

    both(beside, mine, theirs, 12)


def test_its_weights_are_looked_at_by_weak_references(streams: None) -> None:
    """torch exchanges no such tensor: the function gets the other one from a function mode."""
    mine, theirs = twins(Model)
    capture(mine)
    seen: list[Any] = []

    def watched(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        loss = model(inputs(number, 3, 6)).square().mean()
        seen[:] = [weakref.ref(model.field.scale)] if number % 3 else []
        loss.backward()
        return [loss]

    both(watched, mine, theirs, 12)


def test_a_graph_that_is_kept_and_run_twice(streams: None) -> None:
    mine, theirs = twins(Model)
    capture(mine)

    def twice(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        loss = model(inputs(number, 3, 6)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    both(twice, mine, theirs)
    assert recordings(mine).replays >= 4


def test_gradients_of_its_gradients(streams: None) -> None:
    mine, theirs = twins(Model)
    capture(mine)

    def penalized(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number, 3, 6).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=number > 2)
        if number > 2:
            slope.square().sum().backward()
        return [slope]

    both(penalized, mine, theirs)


def test_its_backward_pass_writes_a_weight(streams: None) -> None:
    """Who saved the weight before has to be told: its counter of versions moves."""

    class Decaying(Again):
        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            found = Again.backward(ctx, grad)
            with torch.no_grad():
                ctx.field.scale.mul_(0.5)
            return found

    class Written(Model):
        @override
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Decaying.apply(self.field, self.way, x, *self.field.parameters())  # type: ignore[no-untyped-call]
            return out

    mine, theirs = twins(Written)
    capture(mine)

    def written(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        before = model.field.scale._version
        other = (model.field.scale * inputs(number, 6).requires_grad_()).sum()
        model(inputs(number, 3, 6)).square().mean().backward()
        assert model.field.scale._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
        return []

    both(written, mine, theirs)


def test_its_weights_move(streams: None) -> None:
    mine, theirs = twins(Model)
    capture(mine)

    def moved(model: Any, number: int) -> list[Any]:
        if number % 5 == 4:
            model.field.scale.data = model.field.scale.data.clone() * 2
        return step(model, number)

    both(moved, mine, theirs, 16)
    assert recordings(mine).replays >= 4


def test_hooks_of_its_weights(streams: None) -> None:
    """Those run for what the function asks for, too."""
    mine, theirs = twins(Model)
    for model in (mine, theirs):
        model.field.scale.register_hook(lambda grad: grad * 2 + 1)
    capture(mine)
    both(step, mine, theirs)


def test_a_fixed_point(streams: None) -> None:
    """An equilibrium model: both passes iterate, the second one with gradients of one step."""

    class Implicit(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, cell: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
            ctx.cell = cell
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(4):
                    z = torch.tanh(cell(z) + x)
            ctx.save_for_backward(x, z, *weights)
            return z

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            x, z, *weights = ctx.saved_tensors
            with torch.enable_grad():
                z, x = z.detach().requires_grad_(), x.detach().requires_grad_()
                out = torch.tanh(ctx.cell(z) + x)
            adjoint = grad
            for _ in range(4):
                adjoint = torch.autograd.grad(out, z, adjoint, retain_graph=True)[0] + grad
            return (None, *torch.autograd.grad(out, (x, *weights), adjoint))

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

        @override
        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = Implicit.apply(self.cell, self.head(x), *self.cell.parameters())  # type: ignore[no-untyped-call]
            return z

    def program(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        loss = model(inputs(number, 3, 6)).square().mean()
        loss.backward()
        return [loss]

    mine, theirs = twins(Equilibrium)
    capture(mine)
    both(program, mine, theirs)
    assert recordings(mine).replays >= 4


def test_after_a_fault_of_ours(streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is used as it ran."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GraphSaver, "_find_saved", fails)
    mine, theirs = twins(Model)
    capture(mine)
    with config.patch(strict=False):
        both(step, mine, theirs)
    assert "CG905" in [finding.code for finding in recordings(mine).findings]


def test_no_memory_is_kept_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    before = [one for one in gc.get_objects() if type(one) is SavedLeaves]
    model = Model().to(DEVICE)
    capture(model)
    for number in range(6):
        step(model, number)
    kept = [one for one in gc.get_objects() if type(one) is SavedLeaves and one not in before]
    assert kept
    assert not any(stand_in.numel() for one in kept for stand_in in one._stand_ins.values())
