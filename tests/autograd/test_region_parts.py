"""What a region may be made of: hooks, frozen and replaced parameters, autocast, dropout, norms, views."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import (
    capture,
    recordings,
)
from tests.support.device import DEVICE
from tests.support.regions import STEPS, Block, Several, bits, both, captured_twins, forward_and_back, inputs, replayed
from tests.support.regions import fresh as fresh


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

    both(step, mine, theirs, 12)
    replayed(mine)
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


@pytest.mark.filterwarnings("ignore:CG906")
def test_frozen_and_unfrozen_parameters() -> None:
    """Four combinations of frozen parameters take turns: they are given up, tried again, and replayed in the end."""
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
    logs = []
    for enabled in (False, True):
        torch.manual_seed(0)
        w = torch.randn(6, 6, device=DEVICE, requires_grad=True)
        f = capture(lambda x, w=w: torch.tanh(x @ w)) if enabled else lambda x, w=w: torch.tanh(x @ w)
        g = capture(lambda x: torch.tanh(x @ w)) if enabled else lambda x: torch.tanh(x @ w)  # noqa: B023
        log = []
        for number in range(STEPS):
            for function in (f, g):
                w.grad = None
                y = function(inputs(number))
                y.square().sum().backward()
                log += [bits(y), bits(w.grad)]
                with torch.no_grad():
                    w.sub_(torch.as_tensor(w.grad), alpha=0.1)
        logs.append(log)
    assert logs[0] == logs[1]
    assert recordings(g).replays >= STEPS


@pytest.mark.one_in(2)
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


class Recurrent(nn.Module):
    """Each weight is used several times in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x)).float() + x
        y: Tensor = self.head(x) @ self.head.weight
        return y


@pytest.mark.one_in(2)
@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
def test_autocast_casts_a_weight_once(outside: bool) -> None:
    """The weight is cast once in a call, so gradients of all its uses are added in the low precision, as in eager."""

    class Cast(Recurrent):
        @override
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                return super().forward(x)

    mine, theirs = captured_twins(Recurrent if outside else Cast)

    def step(model: Any, number: int) -> list[Any]:
        model.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=outside):
            y: Tensor = model.m[0](inputs(number))
            assert torch.is_autocast_cache_enabled()
        y.float().square().mean().backward()
        return [y.float(), *[one.grad for one in model.parameters()]]

    both(step, mine, theirs)
    replayed(mine)


@pytest.mark.filterwarnings("ignore:CG501.*another thread runs:capture.CaptureWarning")  # on a GPU, before torch 2.13
def test_autocasts_cache_is_left_alone_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast's cache belongs to the process: it is not emptied while another thread may use it."""
    f, ends, cleared = capture(Recurrent()).to(DEVICE), threading.Event(), list[bool]()
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    waiting = threading.Thread(target=ends.wait)
    waiting.start()
    try:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            for number in range(4):
                f(inputs(number))
            assert not cleared
    finally:
        ends.set()
        waiting.join()


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
    """The body computes a gradient and returns it, as forces of a potential, and the caller differentiates it again."""

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
