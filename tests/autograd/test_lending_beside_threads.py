"""Regions that are recorded while other threads run: no object is exchanged, and the thread hands torch's functions the
tensors that stand in for weights."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from capture.autograd import leaf_swap
from capture.torch_private.capabilities import swap_tensors
from tests.autograd.test_leaf_swap import another_thread, on_a_device
from tests.support.injection import Stopping, listing
from tests.support.regions import Block, bits, both, captured_twins, inputs, twins
from tests.support.regions import fresh as fresh


def no_swaps(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """What objects are exchanged from now on."""
    swapped, real = list[Tensor](), swap_tensors
    assert real is not None

    def swap(one: Tensor, other: Tensor) -> None:
        swapped.append(one)
        real(one, other)

    patch.setattr(leaf_swap, "swap_tensors", swap)
    return swapped


def test_no_object_is_exchanged_while_there_are_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    mine, theirs = captured_twins(Block)
    swapped, weight = no_swaps(monkeypatch), mine.m[0].a.weight
    seen: list[Any] = []

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model.m[0](inputs(number)).square().mean()
        loss.backward()
        seen.append(mine.m[0].a.weight is weight)
        return loss

    with another_thread():
        both(step, mine, theirs)
    replays = recordings(mine.m[0]).replays
    assert replays >= 6
    assert not swapped
    assert all(seen)
    both(step, mine, theirs)
    assert recordings(mine.m[0]).replays > replays


def test_what_the_body_does_with_its_own_parameters_beside_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks them up, reads their attributes, asks for gradients inside, hands on lists of them."""
    on_a_device(monkeypatch)

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.r = nn.Linear(6, 6), nn.GRU(6, 6)
            self.known = {self.a.weight: 2.0}
            self.same: list[bool] = []

        @override
        def forward(self, x: Tensor) -> Tensor:
            weight = self.a.weight
            self.same = [self.a.weight is weight, weight in set(self.parameters()), weight.grad is None]
            y = torch.tanh(self.a(x)) * self.known[weight] * weight.shape[0]
            inner = torch.autograd.grad(y.square().mean(), [weight, self.a.bias], create_graph=True)
            y = y + torch.cat([weight, *self.a.parameters()][:2]).sum() + inner[0].square().sum()
            out: Tensor = self.r(y[None])[0][0]
            return out

    mine, theirs = twins(Asking)
    capture(mine)
    swapped = no_swaps(monkeypatch)
    with another_thread():
        for number in range(8):
            got = []
            for model in (mine, theirs):
                model.zero_grad()
                loss = model(inputs(number, 3, 6)).square().mean()
                loss.backward()
                got.append([loss, *[one.grad for one in model.parameters()], *model.parameters()])
                assert model.same == [True, True, True]
            assert list(map(bits, got[0])) == list(map(bits, got[1])), number
    assert not swapped
    assert recordings(mine).replays >= 8


_LENDING = {
    "lent_in_this_thread",
    "_StandIns.__init__",
    "_StandIns.end",
    "_StandIns.__torch_function__",
    "GraphSaver.run",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised as a generator is closed
@pytest.mark.parametrize("by_signal", [True, False])
def test_stopped_while_weights_are_lent_beside_other_threads(by_signal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread lends nothing after that, and the gradients are those of the weights."""
    on_a_device(monkeypatch)
    places: list[int] = []

    def stopped(at: int, kind: type[Stopping] = Stopping) -> None:
        mine, theirs = captured_twins(Block)
        mine.m[0](inputs(0)).sum().backward()
        depth = torch._C._len_torch_function_stack()
        stopping = kind(at, KeyboardInterrupt, lines=True, by_signal=by_signal)
        with contextlib.suppress(KeyboardInterrupt), stopping:
            mine.m[0](inputs(0))
        assert torch._C._len_torch_function_stack() == depth, stopping.where
        mine.zero_grad()
        for model in (mine, theirs):
            model.m[0](inputs(1)).square().sum().backward()
        pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
        assert all(bits(one.grad) == bits(other.grad) for one, other in pairs), stopping.where

    with another_thread(), config.patch(strict=False):
        for _ in range(2):
            places.clear()
            stopped(-1, listing(_LENDING, places))
        assert places
        for at in places[::12]:
            stopped(at)


class Doubling(torch.autograd.Function):
    """Gets a parameter below all functions of torch."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x * 2


def test_what_no_function_of_torch_is_given_waits_until_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other threads run such calls are eager, with one warning. When the threads have ended they are recorded."""
    on_a_device(monkeypatch)

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        @override
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Doubling.apply(torch.tanh(x), self.w)  # type: ignore[no-untyped-call]
            return out

    mine, theirs = twins(Custom)
    capture(mine)

    def step(model: Any, number: int) -> Tensor:
        model.zero_grad()
        loss: Tensor = model(inputs(number, 3, 6)).square().mean()
        loss.backward()
        return torch.stack([loss, *[one.grad.sum() for one in model.parameters()]])

    with another_thread(), pytest.warns(CaptureWarning, match="CG501.*another thread runs") as told:
        both(step, mine, theirs)
    assert len(told) == 1
    assert recordings(mine).replays == 0
    both(step, mine, theirs)
    assert recordings(mine).replays >= 6
