"""Regional capture: functions whose results need gradients outside, against an eager twin."""

from __future__ import annotations

import copy
import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from capture import (
    CaptureError,
    CaptureWarning,
    _step,
    _trees,
    capture,
    config,
    explain,
    mark_step_begin,
    plans,
    recordings,
    release,
    reset,
    warmup,
)
from capture._runtime import Captured
from tests.device import DEVICE, MOVES_HELD

STEPS = 8


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_step.marks(), "begun", 0)
    _trees.forget_trees()
    with torch.enable_grad(), config.patch(cache=False):
        yield


def bits(value: Any) -> Any:
    """A tensor, or None, as bytes."""
    return value.detach().numpy(force=True).tobytes() if isinstance(value, Tensor) else value


class Block(nn.Module):
    """Something of everything: norms, an activation, attention-like products, dropout, a skip connection."""

    def __init__(self, width: int = 6, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(drop)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        y: Tensor = x + self.drop(torch.tanh(self.b(mixed)))
        return y


Program = Callable[[Any, int], Any]
"""Of a model and a number that all randomness is made of."""


def twins(make: Callable[[], Any]) -> tuple[Any, Any]:
    """The same modules twice."""
    torch.manual_seed(0)
    one = make().to(DEVICE)
    return one, copy.deepcopy(one)


def forward_and_back(model: Any, number: int) -> Tensor:
    """The first region alone, and its backward pass."""
    model.zero_grad()
    y: Tensor = model.m[0](inputs(number))
    y.square().mean().backward()
    return y


def both(program: Program, mine: Any, theirs: Any, steps: int = STEPS) -> None:
    """Run ``program(model, number)`` with each twin, step by step from the same seeds, and compare all it gives, all
    parameters and their gradients."""
    for number in range(steps):
        found = []
        for one, enabled in ((theirs, False), (mine, True)):
            torch.manual_seed(number)
            with config.patch(enabled=enabled):
                result = program(one, number)
            state = [(bits(p), bits(p.grad)) for p in one.parameters()]
            state += [bits(b) for b in one.buffers()]
            found.append([[bits(r) for r in result] if isinstance(result, (tuple, list)) else bits(result), state])
        names = [name for name, _ in (*mine.named_parameters(), *mine.named_buffers())]
        wrong = [name for name, a, b in zip(names, found[0][1], found[1][1], strict=True) if a != b]
        assert not wrong, f"step {number}"
        assert found[0] == found[1], f"step {number}"


def inputs(number: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*(shape or (4, 6)), generator=generator, device="cpu").to(DEVICE)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_blocks_in_an_eager_loop(optimizer: str, to_none: bool, marks: bool) -> None:
    mine, theirs = twins(lambda: nn.Sequential(Block(), Block(), Block()))
    for block in mine:
        capture(block)
    optimizers = {id(one): OPTIMIZERS[optimizer](one.parameters()) for one in (mine, theirs)}

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
        assert recordings(block).recordings <= (4 if MOVES_HELD else 6)  # the step's results are held: copies then
        assert recordings(block).eager_calls == 0


class Wrapped(nn.Module):
    """Holds modules whose use is up to the test; ``f`` is captured in one twin alone."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.m = nn.ModuleList(modules)


def captured_twins(*make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    mine, theirs = twins(lambda: Wrapped(*(one() for one in make)))
    for one in mine.m:
        capture(one, **options)
    return mine, theirs


def replayed(mine: Any, least: int = 1) -> None:
    for one in mine.m if MOVES_HELD else ():  # else more is recorded than replayed, and values are all that counts
        assert recordings(one).replays >= least, (recordings(one), [(e.kind, e.detail) for e in recordings(one).events])


ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]


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
    """Saved tensors lie side by side, short ones among long ones, and share no memory."""
    long_ways: list[int] = []
    dispatch = Captured._dispatch

    def counted(self: Captured, values: Any, now: Any) -> Any:
        long_ways.append(self.number)
        return dispatch(self, values, now)

    monkeypatch.setattr(Captured, "_dispatch", counted)
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        if number == STEPS - 2:
            long_ways.clear()
        model.zero_grad()
        x: Tensor = inputs(number)
        for block in model.m:
            x = block(x)
        x.square().mean().backward()
        return x

    both(step, mine, theirs)
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


class Several(nn.Module):
    """Outputs in a structure: two that need gradients, the same one twice, an integer one, Python values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    @override
    def forward(self, x: Tensor) -> dict[str, Any]:
        one, two = torch.relu(self.a(x)), torch.sigmoid(self.b(x))
        return {"one": one, "more": [two, (one, "text", 3)], "best": two.argmax(-1), "mean": one.detach().mean()}


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
    """What autograd makes of ``sgn`` in a backward pass, or gives to one, and hands out as a gradient."""

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
    assert [bits(one) for one in kept[id(mine)]] == [bits(one) for one in kept[id(theirs)]]


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
    assert [bits(one) for one in kept[id(mine)]] == [bits(one) for one in kept[id(theirs)]]


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
        one, two = weight[id(model)]
        model.zero_grad()
        y = two(one(inputs(number)))
        y.square().mean().backward()
        return [y]

    mine, theirs = twins(lambda: Wrapped(nn.Linear(6, 6, bias=False)))
    both(step, mine, theirs)
    assert recordings(weight[id(mine)][0]).replays >= 3


def test_hooks_on_parameters_and_tensors_run_every_time() -> None:
    mine, theirs = captured_twins(Block)
    counts = {id(mine): 0, id(theirs): 0}
    for model in (mine, theirs):

        def hook(grad: Tensor, key: int = id(model)) -> Tensor:
            counts[key] += 1
            return grad * (1 + counts[key] % 100 / 8)

        def after(p: Tensor, key: int = id(model)) -> None:
            counts[key] += 100

        model.m[0].a.weight.register_hook(hook)
        model.m[0].b.weight.register_post_accumulate_grad_hook(after)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        x.register_hook(lambda grad: grad + 1)
        y: Tensor = model.m[0](x)
        y.register_hook(lambda grad: grad * 2)
        y.square().mean().backward()
        assert x.grad is not None
        return x.grad

    both(step, mine, theirs)
    replayed(mine)
    assert counts[id(mine)] == counts[id(theirs)] == STEPS * 101


def test_hooks_do_not_run_where_no_gradient_comes() -> None:
    mine, theirs = captured_twins(Several)
    counts = {id(mine): 0, id(theirs): 0}
    for model in (mine, theirs):

        def hook(grad: Tensor, key: int = id(model)) -> Tensor:
            counts[key] += 1
            return grad * 2

        model.m[0].a.weight.register_hook(hook)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        out = model.m[0](inputs(number))
        loss: Tensor = out["one" if number % 3 == 0 else "more"][0].sum()
        loss.backward()
        return loss

    with pytest.warns(CaptureWarning, match="CG501.*not every result"):
        both(step, mine, theirs, 12)
    assert counts[id(mine)] == counts[id(theirs)]


def test_outputs_written_in_place() -> None:
    mine, theirs = captured_twins(lambda: nn.Linear(6, 6))

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        y = model.m[0](inputs(number))
        y.add_(1)
        y[0].mul_(3)
        z = y.clone()
        z.square().mean().backward()
        return [y, z]

    both(step, mine, theirs)
    replayed(mine)


def test_frozen_and_unfrozen_parameters() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        model.m[0].a.requires_grad_(number % 12 < 4 or number % 12 >= 8)
        model.m[0].b.bias.requires_grad_(number % 12 < 6)
        y: Tensor = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 24)
    replayed(mine)


def test_all_parameters_frozen() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.requires_grad_(number % 8 >= 4)
        y: Tensor = model.m[0](inputs(number))
        assert y.requires_grad == (number % 8 >= 4)
        if y.requires_grad:
            y.square().mean().backward()
        return y

    both(step, mine, theirs, 24)
    replayed(mine)


def test_replaced_parameters() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        if number % 4 == 3:
            torch.manual_seed(number)
            model.m[0].b.weight = nn.Parameter(torch.randn(6, 6, device=DEVICE))
        if number % 4 == 1:
            model.m[0].a.weight.data = model.m[0].a.weight.data.clone()
        y: Tensor = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 20)
    replayed(mine)


def test_closure_weights_that_are_no_parameters() -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        w = torch.randn(6, 6, device=DEVICE, requires_grad=True)
        f = capture(lambda x, w=w: torch.tanh(x @ w)) if enabled else lambda x, w=w: torch.tanh(x @ w)
        g = capture(lambda x: torch.tanh(x @ w)) if enabled else lambda x: torch.tanh(x @ w)  # noqa: B023
        log = []
        for number in range(STEPS):
            for one in (f, g):
                w.grad = None
                y = one(inputs(number))
                y.square().sum().backward()
                log += [bits(y), bits(w.grad)]
                with torch.no_grad():
                    w.sub_(torch.as_tensor(w.grad), alpha=0.1)
        found.append(log)
    assert found[0] == found[1]
    assert recordings(g).replays >= STEPS


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
def test_autocast(outside: bool) -> None:
    class Cast(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not outside or torch.is_autocast_enabled()):
                return super().forward(x)

    mine, theirs = captured_twins(Cast)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=outside and number % 3 != 1):
            y: Tensor = model.m[0](inputs(number))
        y.float().square().mean().backward()
        return y.float()

    both(step, mine, theirs, 16)
    replayed(mine)


def test_eval_and_no_grad_calls_in_between() -> None:
    mine, theirs = captured_twins(lambda: Block(drop=0.3))

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        y = model.m[0](inputs(number))
        with torch.no_grad():
            z = model.m[0](inputs(number + 100))
        y.square().mean().backward()
        model.eval()
        u = model.m[0](inputs(number))
        with torch.inference_mode():
            v = model.m[0](inputs(number)).clone()
        model.train()
        return [y, z, u, v]

    both(step, mine, theirs, 12)
    replayed(mine, 20)


def test_dropout() -> None:
    mine, theirs = captured_twins(lambda: Block(drop=0.5), lambda: Block(drop=0.5))

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        first = model.m[0](inputs(number))
        second = model.m[1](inputs(number))
        second.sum().backward()
        first.sum().backward()
        return [first, second, torch.rand(3, device=DEVICE)]

    both(step, mine, theirs)
    replayed(mine, 8)


def test_batch_norm() -> None:
    mine, theirs = captured_twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)))

    both(forward_and_back, mine, theirs)
    replayed(mine)


def test_convolutions_and_embeddings() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(10, 4), nn.Conv1d(4, 4, 3, padding=1)

        @override
        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = F.max_pool1d(F.gelu(self.conv(self.table(ids).transpose(1, 2))), 2)
            return y

    mine, theirs = captured_twins(Net)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        ids = torch.randint(0, 10, (2, 6), generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        y: Tensor = model.m[0](ids)
        y.square().mean().backward()
        return y

    both(step, mine, theirs)
    replayed(mine)


def test_a_custom_function_inside() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        @override
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x * x * grad

    class Net(Block):
        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Cube.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return y

    mine, theirs = captured_twins(Net)

    both(forward_and_back, mine, theirs)
    replayed(mine)


def test_gradients_computed_inside() -> None:
    """As for forces of a potential: a gradient is part of the result, and is differentiated again outside."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 1)

        @override
        def forward(self, x: Tensor) -> Tensor:
            energy = torch.tanh(self.net(x)).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    mine, theirs = captured_twins(Forces)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        force: Tensor = model.m[0](inputs(number).requires_grad_())
        force.square().sum().backward()
        return force

    both(step, mine, theirs)
    replayed(mine)


def test_views_of_arguments_and_one_argument_twice() -> None:
    class Net(nn.Module):
        @override
        def forward(self, x: Tensor, y: Tensor, scale: float = 2.0) -> Tensor:
            return (x.t() @ y[:, 1:]) * x.reshape(-1)[3] * scale

    mine, theirs = captured_twins(Net)

    def step(model: Any, number: int) -> list[Any]:
        x, y, z = (inputs(number + 50 * i).requires_grad_() for i in range(3))
        out = [model.m[0](x, y), model.m[0](z, z, scale=3.0)]
        (out[0].sum() + out[1].square().sum()).backward()
        return [*out, x.grad, y.grad, z.grad]

    both(step, mine, theirs, 14)
    replayed(mine)


def test_exceptions_in_the_body() -> None:
    class Net(Block):
        fails = False

        @override
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise ValueError("on purpose")
            return y

    mine, theirs = captured_twins(Net)

    def step(model: Any, number: int) -> list[Tensor]:
        model.zero_grad()
        model.m[0].fails = number % 3 == 1
        try:
            y = model.m[0](inputs(number))
        except ValueError:
            return []
        y.sum().backward()
        return [y]

    both(step, mine, theirs, 16)
    replayed(mine)


def test_an_exception_in_the_recording_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = captured_twins(Block)
    from capture import _record

    original = _record._run

    def run(captured: Any, entry: Any, call: Any, tree: Any, staged: Any, expected: Any, *, undo: bool) -> Any:
        recorded = original(captured, entry, call, tree, staged, expected, undo=undo)
        if "gradient_0" in captured.annotation.parameters:
            from attrs import evolve

            assert recorded.recording is not None
            recorded.recording.release()
            return evolve(recorded, recording=None, failure="on purpose")
        return recorded

    monkeypatch.setattr(_record, "_run", run)

    with pytest.warns(CaptureWarning, match="CG904"):
        both(forward_and_back, mine, theirs)
    replayed(mine)


def test_reset_and_release_with_a_backward_to_come() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        if model is mine and number in (5, 6):
            (release if number == 5 else reset)(model.m[0])
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 16)
    replayed(mine)


def test_what_is_said_about_a_region() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        y: Tensor = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        both(step, mine, theirs)
    found = recordings(mine.m[0])
    assert found.recordings == 2
    assert found.eager_calls == 0
    assert found.replays >= 2 * (STEPS - 4)
    assert any(one.code == "CG501" for one in found.findings)
    assert [plan.outcome for plan in plans(mine.m[0])] == ["record", "record"]
    assert explain(mine.m[0])(inputs(0)).outcome == "record"
    reset(mine.m[0])
    assert recordings(mine.m[0]).recordings == 0
    both(step, mine, theirs)
    assert recordings(mine.m[0]).recordings == 2


def test_warmup_of_a_region() -> None:
    mine, theirs = captured_twins(lambda: Block(drop=0.2))
    state = [bits(p) for p in mine.parameters()]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    warmup(mine.m[0])(inputs(0))
    assert torch.equal(before, torch.get_rng_state())
    assert [bits(p) for p in mine.parameters()] == state
    assert recordings(mine.m[0]).recordings == 1

    both(forward_and_back, mine, theirs)
    assert recordings(mine.m[0]).replays >= STEPS + 3


def test_plans_on_disk(tmp_path: Any) -> None:
    with config.patch(cache=True, cache_dir=tmp_path):
        for _ in range(2):
            mine, theirs = captured_twins(Block)

            def step(model: Any, number: int) -> Tensor:
                model.zero_grad()
                y: Tensor = model.m[0](inputs(number).requires_grad_(number % 2 == 0))
                y.square().mean().backward()
                return y

            both(step, mine, theirs, 12)
            replayed(mine)
    assert recordings(mine.m[0]).plans_loaded >= 1


def test_recording_without_a_watched_run() -> None:
    with config.patch(skip_warmup=True):
        mine, theirs = captured_twins(Block)

        def step(model: Any, number: int) -> Any:
            model.zero_grad()
            x = inputs(number).requires_grad_(number % 2 == 0)
            model.m[0](x).square().mean().backward()
            return [x.grad]

        both(step, mine, theirs, 12)
        replayed(mine)


@pytest.mark.parametrize("verify", ["first", "always"])
def test_verified_regions(verify: str) -> None:
    mine, theirs = captured_twins(lambda: Block(drop=0.2), verify=verify)

    def step(model: Any, number: int) -> Any:
        model.zero_grad()
        y = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    both(step, mine, theirs, 10)
    assert recordings(mine.m[0]).verifications >= 2


@pytest.mark.parametrize("outputs", ["borrow", "clone"])
def test_other_policies_for_outputs(outputs: str) -> None:
    mine, theirs = captured_twins(Block, outputs=outputs)

    def step(model: Any, number: int) -> Any:
        mark_step_begin()
        model.zero_grad()
        y = model.m[0](inputs(number))
        loss = y.square().mean()
        mark_step_begin()
        model.m[0](inputs(number + 1))
        loss.backward()
        return [loss]

    both(step, mine, theirs, 10)
    replayed(mine)


def test_poisoned_memory() -> None:
    with config.patch(poison=True):
        mine, theirs = captured_twins(lambda: Block(drop=0.2), Block)

        def step(model: Any, number: int) -> Any:
            model.zero_grad()
            losses = [model.m[1](model.m[0](inputs(number + i))).square().mean() for i in range(2)]
            losses[1].backward()
            losses[0].backward()
            return losses

        both(step, mine, theirs, 10)
        replayed(mine)


def test_a_backward_in_another_thread() -> None:
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        loss = y.square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return y

    both(step, mine, theirs)
    replayed(mine)


@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
def test_a_backward_in_a_thread_of_autograd_itself(monkeypatch: pytest.MonkeyPatch, marks: bool) -> None:
    """As on accelerators: the thread of the forward pass waits, and its tree and its marks are used."""
    monkeypatch.setattr(_trees, "_runs_for", lambda _: True)
    mine, theirs = captured_twins(Block)

    def step(model: Any, number: int) -> Tensor:
        if marks:
            mark_step_begin()
        model.zero_grad()
        y: Tensor = model.m[0](inputs(number))
        loss = y.square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return y

    both(step, mine, theirs)
    replayed(mine, 2 * (STEPS - 4))
    found = recordings(mine.m[0])
    assert (found.recordings, found.evacuations) == (2, 0)


def test_settings_hold_in_a_thread_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trees, "_runs_for", lambda _: True)
    found: list[tuple[bool, int]] = []

    def run() -> None:
        before = (config.current().poison, _step.steps_begun())
        with _trees.at_home(there):
            mark_step_begin()
            found.append((config.current().poison, _step.steps_begun()))
        assert (config.current().poison, _step.steps_begun()) == before

    with config.patch(poison=True):
        mark_step_begin()
        there = _trees.home()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(True, 2)]
    assert _step.steps_begun() == 2


def test_a_region_inside_a_captured_step() -> None:
    mine, theirs = captured_twins(Block)
    steps: dict[int, Any] = {}

    def step(model: Any, number: int) -> Any:
        def body(x: Tensor) -> Tensor:
            model.zero_grad()
            loss: Tensor = model.m[0](x).square().mean()
            loss.backward()
            return loss.detach()

        run = steps.setdefault(id(model), capture(body))
        if number % 4 == 0:
            model.zero_grad()
            model.m[0](inputs(number)).sum().backward()
        return run(inputs(number))

    both(step, mine, theirs, 12)
    assert recordings(steps[id(mine)]).replays


def test_a_step_whose_loss_is_not_detached() -> None:
    mine, theirs = twins(lambda: Wrapped(Block()))

    def body(model: Any, x: Tensor) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](x).square().mean()
        loss.backward()
        return loss

    run = capture(body)
    with pytest.warns(CaptureWarning, match="CG501"):
        both(lambda model, number: run(model, inputs(number)), mine, theirs)


EAGER: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input": lambda m, x: (x, m(x)),
    "a view of an input": lambda m, x: (x.t(), m(x)),
    "a weight": lambda m, x: (m.b.weight, m(x)),
    "outputs that share memory": lambda m, x: m(x).chunk(2),
    "a hook inside": lambda m, x: _hooked(m(x)) * 2,
    "retain_grad inside": lambda m, x: _retained(m(x)) * 2,
    "a checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "a reentrant checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=True),
}


def _hooked(y: Tensor) -> Tensor:
    y.register_hook(lambda grad: grad * 3)
    return y


def _retained(y: Tensor) -> Tensor:
    y.retain_grad()
    return y


@pytest.mark.parametrize("name", EAGER)
def test_what_cannot_be_cut_off_runs_eagerly(name: str) -> None:
    mine, theirs = twins(lambda: Wrapped(Block(drop=0.2)))
    run = capture(lambda model, x: EAGER[name](model.m[0], x))

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        out = run(model, x)
        out = out if isinstance(out, tuple) else (out,)
        sum(one.square().sum() for one in out).backward()
        return [*out, x.grad]

    with pytest.warns(CaptureWarning, match="CG501"):
        both(step, mine, theirs)
    assert recordings(run).replays == 0


def test_an_argument_that_needs_gradients_and_is_written() -> None:
    run = capture(lambda x: x.mul_(2).tanh())

    def step(f: Callable[[Tensor], Tensor], number: int) -> list[Any]:
        leaf = inputs(number).requires_grad_()
        x = leaf * 1
        y = f(x)
        (y.sum() + x.sum()).backward()
        return [bits(y), bits(x), bits(leaf.grad)]

    with pytest.warns(CaptureWarning, match="CG501.*x is written"):
        assert all(step(lambda x: x.mul_(2).tanh(), number) == step(run, number) for number in range(5))
    assert recordings(run).replays == 0


def test_state_left_with_a_graph() -> None:
    class Net(Block):
        last: Any = None

        @override
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last * 2  # type: ignore[no-any-return]

    mine, theirs = captured_twins(Net)

    def step(model: Any, number: int) -> Any:
        model.zero_grad()
        y = model.m[0](inputs(number))
        (y.sum() + model.m[0].last.square().sum()).backward()
        return [y]

    with pytest.warns(CaptureWarning, match="CG501"):
        both(step, mine, theirs)


def test_a_closure_tensor_with_a_graph_of_its_own() -> None:
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        base = torch.randn(6, 6, device=DEVICE, requires_grad=True)
        held: dict[str, Any] = {}
        log = []

        def body(x: Tensor) -> Tensor:
            return torch.tanh(x @ held["w"])  # noqa: B023

        f = capture(body) if enabled else body
        for number in range(12):
            base.grad = None
            held["w"] = base * number if number not in (3, 7) else base.detach().requires_grad_()
            f(inputs(number)).sum().backward()
            log += [bits(base.grad), bits(held["w"].grad) if number in (3, 7) else None]
        found.append(log)
    assert found[0] == found[1]
    assert recordings(f).replays >= 8 or not MOVES_HELD


def test_gradients_of_gradients_are_an_error_that_names_the_fix() -> None:
    mine, _ = captured_twins(Block)
    for number in range(STEPS):
        x = inputs(number).requires_grad_()
        if number < 4:
            mine.m[0](x).sum().backward()
            continue
        with pytest.raises(CaptureError, match="enabled=False"):
            torch.autograd.grad(mine.m[0](x).sum(), x, create_graph=True)


def test_regions_die_with_their_modules() -> None:
    def run() -> list[Any]:
        import weakref

        mine, _ = captured_twins(Block)
        for number in range(6):
            mine.m[0](inputs(number)).sum().backward()
        replayed(mine)
        return [weakref.ref(mine.m[0].a.weight), weakref.ref(mine.m[0])]

    references = run()
    gc.collect()
    for tree in _trees.trees_here().values():
        tree.sweep()
    gc.collect()
    assert [one() for one in references] == [None, None]


@pytest.mark.skipif(not MOVES_HELD, reason="held outputs cannot be moved out of the pool")
def test_nothing_is_kept_after_a_step() -> None:
    """What autograd saved dies with the backward pass, as in eager."""
    mine, _ = captured_twins(Block)
    for number in range(8):
        mine.m[0](inputs(number)).sum().backward()
        mine.zero_grad()
    tree = next(iter(_trees.trees_here().values()))
    assert not tree.live_blocks()


class Play:
    """A random program over four regions: what a training loop may do, in any order. Draws depend on ``seed`` alone."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.pending: list[tuple[Tensor, list[Tensor]]] = []
        self.kept: list[tuple[Any, Any]] = []
        self.values: list[Tensor] = [inputs(seed)]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def act(self, number: int) -> list[Any]:
        """One action; gives what it computed."""
        choices = ["forward"] * 5 + ["chain"] * 2 + ["backward"] * 5
        choices += ["drop", "zero", "step", "keep", "grad", "eval", "mark"]
        action = self.random.choice(choices)
        result: list[Any] = getattr(self, action)(number)
        return [*result, *[(bits(one), bits(copied)) for one, copied in self.kept]]

    def block(self) -> Any:
        return self.random.choice(list(self.model.m))

    def forward(self, number: int) -> list[Any]:
        x = self.random.choice([inputs(number), self.values[-1].detach(), inputs(number).requires_grad_()])
        y = self.block()(x)
        self.values = [*self.values[-3:], y]
        self.pending.append((y.square().mean(), [x]))
        return [bits(y)]

    def chain(self, number: int) -> list[Any]:
        x = inputs(number).requires_grad_(self.random.random() < 0.5)
        y = x
        for _ in range(self.random.randint(2, 3)):
            y = self.block()(y)
        self.pending.append((y.sum() * 0.1, [x]))
        return [bits(y)]

    def backward(self, number: int) -> list[Any]:
        if not self.pending:
            return []
        index = self.random.randrange(len(self.pending))
        loss, leaves = self.pending[index]
        retain = self.random.random() < 0.3
        if not retain:
            del self.pending[index]
        try:
            loss.backward(retain_graph=retain)
        except RuntimeError as error:  # parameters were written since
            return [type(error).__name__, "modified by an inplace operation" in str(error)]
        return [bits(loss), *[bits(leaf.grad) for leaf in leaves if leaf.is_leaf]]

    def grad(self, number: int) -> list[Any]:
        block = self.block()
        y = block(inputs(number))
        found = torch.autograd.grad(y.sum(), [block.a.weight, block.b.bias])
        self.kept = [*self.kept[-3:], *((one, one.clone()) for one in found)]
        return list(map(bits, found))

    def drop(self, number: int) -> list[Any]:
        self.pending = self.pending[len(self.pending) // 2 :]
        return []

    def zero(self, number: int) -> list[Any]:
        self.model.zero_grad(set_to_none=self.random.random() < 0.5)
        return []

    def step(self, number: int) -> list[Any]:
        if self.random.random() < 0.8:
            self.pending.clear()
        self.optimizer.step()
        return []

    def keep(self, number: int) -> list[Any]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if grads:
            one = self.random.choice(grads)
            self.model.zero_grad()
            self.kept = [*self.kept[-3:], (one, one.clone())]
        return []

    def eval(self, number: int) -> list[Any]:
        with torch.no_grad():
            return [bits(self.block()(inputs(number)))]

    def mark(self, number: int) -> list[Any]:
        if self.random.random() < 0.2:
            mark_step_begin()
        return []


@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poisoned"])
@pytest.mark.parametrize("seed", range(30))
def test_random_programs(seed: int, poison: bool) -> None:
    makers = (Block, lambda: Block(drop=0.2), Block, lambda: Block(drop=0.2))
    mine, theirs = captured_twins(*makers, outputs=("preserve", "clone")[seed % 5 == 4])
    plays = {id(model): Play(model, seed) for model in (mine, theirs)}
    with config.patch(poison=poison), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # CG901: more places in the tree than recordings
        both(lambda model, number: (plays[id(model)].act(number),), mine, theirs, 80)
    replayed(mine, 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_region(reentrant: bool) -> None:
    """Hooks on saved tensors see what eager saves: under them, as in a checkpoint, functions run inline, and say so."""
    mine, theirs = captured_twins(lambda: Block(drop=0.3))

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        y: Tensor = checkpoint(model.m[0], x, use_reentrant=reentrant)
        y.square().mean().backward()
        return y

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        both(step, mine, theirs)
    assert ["CG805" in str(one.message) for one in caught] == ([] if reentrant else [True])
    found = recordings(mine.m[0])
    assert (bool(found.replays), found.eager_calls) == ((True, 0) if reentrant else (False, 2 * STEPS))


def test_hooks_on_saved_tensors_see_what_eager_saves() -> None:
    mine, theirs = captured_twins(Block)
    seen: dict[int, list[Any]] = {id(mine): [], id(theirs): []}

    def step(model: Any, number: int) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            seen[id(model)].append(tuple(tensor.shape))
            return tensor * 2 if tensor.dim() == 2 else tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y: Tensor = model.m[0](inputs(number))
        y.square().mean().backward()
        return y

    both(forward_and_back, mine, theirs)
    with pytest.warns(CaptureWarning, match="CG805"):
        both(step, mine, theirs)
    assert seen[id(mine)] == seen[id(theirs)]


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_weight_whose_cast_autocast_has_cached() -> None:
    """The cache refers to the weight weakly, and torch does not exchange a tensor that somebody refers to so: its node
    is that of the eager call."""
    mine, theirs = captured_twins(lambda: nn.Linear(6, 6))

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            with config.patch(enabled=False):
                model.m[0](inputs(number))
            y: Tensor = model.m[0](inputs(number + 100)).float()
        y.square().mean().backward()
        return y

    both(step, mine, theirs)
    replayed(mine, 2 * (STEPS - 4))


def test_what_autograd_saved_may_be_kept() -> None:
    """Between the two passes of a region are tensors that no user gets, unless the graph is asked: they are new ones,
    or the same objects again where nobody has them."""
    module = capture(Block()).to(DEVICE)
    held: list[tuple[Any, list[Any]]] = []
    for number in range(14):
        mark_step_begin()
        y = module(inputs(number))
        if number % 3 == 1:
            saved = y.grad_fn.saved_tensors
            held.append((saved, [bits(one) for one in saved]))
        if number % 4 != 2:
            y.square().sum().backward()
        for kept, values in held:
            assert [bits(one) for one in kept] == values
        if number == 9:
            held.clear()
    assert recordings(module).replays >= 10


def test_a_parameter_unfrozen_before_the_recording() -> None:
    """The run that shows that gradients are needed after all saved an input in the pool, and is no recording."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        holder = nn.Linear(6, 6, bias=False, device=DEVICE).requires_grad_(False)

        def body(x: Tensor) -> Tensor:
            return torch.tanh(x @ holder.weight.t())  # noqa: B023

        f = capture(body) if enabled else body
        f(inputs(0))
        holder.requires_grad_(True)
        results = [f(inputs(number)) for number in range(4)]
        log = []
        for y in results:
            holder.weight.grad = None
            y.square().mean().backward()
            log.append(bits(holder.weight.grad))
        found.append(log)
    assert found[0] == found[1]


def test_memory_of_a_parameter_replaced_before_the_backward() -> None:
    """``.data =`` takes nothing from a view that was saved."""
    mine, theirs = twins(lambda: Wrapped(nn.Linear(6, 6), nn.Linear(6, 6)))
    capture(mine.m[0])

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        x = inputs(number).requires_grad_()
        y = torch.tanh(model.m[0](x))
        model.m[0].weight.data = inputs(number + 9, 6, 6)
        y.square().mean().backward()
        return [y, x.grad]

    both(step, mine, theirs)
    assert recordings(mine.m[0]).replays >= STEPS or not MOVES_HELD


def test_gradients_switched_on_inside_alone() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 1)

        @override
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(torch.tanh(self.net(x)).sum(), x, create_graph=True)
            return force, x.detach() * 2 + self.net.bias

    mine, theirs = captured_twins(Forces)
    for number in range(STEPS):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", CaptureWarning)
            right, found = theirs.m[0](inputs(number)), mine.m[0](inputs(number))
        assert [bits(one) for one in found] == [bits(one) for one in right]
        assert [one.requires_grad for one in found] == [True, False] == [one.requires_grad for one in right]
    assert any("inside alone" in one.what for one in recordings(mine.m[0]).findings)
