"""An error of the library after a region's body has run: the call gives eager's result with gradients and one finding,
and nothing runs twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from capture.autograd import saved_graph
from capture.autograd.saved_graph import GraphSaver, SavedTensorHooks
from capture.observe import run
from capture.runtime import planning, record, training_region, watched_call
from capture.runtime.training_region import Frame, Region
from tests.support.device import AGAIN, DEVICE, EXECUTES
from tests.support.regions import bits, inputs, twins
from tests.support.regions import fresh as fresh

STEPS = 10 if AGAIN else 6


@pytest.fixture(autouse=True)
def not_strict() -> Iterator[None]:
    with config.patch(strict=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class Net(nn.Module):
    """Uses a weight twice, and writes a buffer and attributes, one of them with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.last: Tensor | None = None
        self.loss: Tensor | None = None

    @override
    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, int]:
        y = torch.tanh(self.norm(self.a(x))) @ w
        z = nn.functional.dropout(self.a(y) * y, 0.3)
        self.last, self.loss = z.detach() * 2, z.square().mean()
        return z, y.sum(), 3


Failing = Callable[[Callable[..., None]], None]


def once(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, *, after: bool = False) -> list[int]:
    """Have a function raise at its next call, before or after it has done its work. Gives a list, empty once it did."""
    original, left = getattr(holder, name), [1]

    def failing(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if after or not left else None
        if left:
            left.clear()
            raise ValueError("a fault of this library")
        return result

    monkeypatch.setattr(holder, name, failing)
    return left


AFTER_THE_BODY = {
    "edges": (GraphSaver, "_note_edges"), "saved": (GraphSaver, "_find_saved"), "let go": (GraphSaver, "_let_go"),
    "end": (SavedTensorHooks, "end_run"), "seeds": (SavedTensorHooks, "mark_seeds"),
    "attached": (GraphSaver, "_attached"),    "hooks": (saved_graph, "add_hook"), "compare": (run, "_compare"),
}  # fmt: skip
WATCHED = {"describe": (planning, "describe"), "plan": (planning, "take"), "phase": (watched_call, "enter"),
           "join": (training_region, "_parted")}  # fmt: skip
RECORDED = {"outputs": (record, "plan_recorded"), "node": (record, "_node"), "settle": (Region, "settle")}
BACKWARD = {"there": (training_region, "acting_for"), "inputs": (Frame, "_of_inputs"), "region": (Region, "gradients"),
            "pool": (training_region, "tree_for"), "backward": (training_region._Backward, "__call__"),
            "thread": (training_region, "worker"), "sum": (training_region, "_added")}  # fmt: skip


def train(net: Any, w: Tensor, number: int) -> list[Any]:
    torch.manual_seed(number)
    x = inputs(number).requires_grad_()
    net.zero_grad()
    w.grad = None
    z, total, three = net(x, w)
    (z.square().sum() + total + net.loss).backward()
    tensors = [z, total, net.last, net.loss, x.grad, w.grad, *[p.grad for p in net.parameters()], *net.buffers()]
    return [three, torch.rand(1).item(), *map(bits, tensors)]


def fails(
    monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str], call: int, *, after: bool = False, is_told: bool = True
) -> Any:
    """Train twins, of which the captured one meets a fault in one call. ``is_told``: the finding has to be there."""
    mine, theirs = twins(Net)
    weights = [torch.eye(6, device=DEVICE).requires_grad_() for _ in range(2)]
    capture(mine)
    for number in range(STEPS):
        expected = train(theirs, weights[1], number)
        with monkeypatch.context() as patch:
            left = once(patch, *where, after=after) if number == call else []
            assert train(mine, weights[0], number) == expected, number
            assert not left
    counts = recordings(mine)
    codes = [finding.code for finding in counts.findings if finding.code == "CG905"]
    assert codes == ["CG905"] or not (codes or is_told)
    return counts


@pytest.mark.one_in(18)
@pytest.mark.parametrize("after", [False, True], ids=["at its begin", "at its end"])
@pytest.mark.parametrize("name", [*AFTER_THE_BODY, *WATCHED])
def test_a_watched_run(monkeypatch: pytest.MonkeyPatch, name: str, after: bool) -> None:
    found = fails(monkeypatch, {**AFTER_THE_BODY, **WATCHED}[name], 1, after=after)
    assert found.replays


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", [*AFTER_THE_BODY, *RECORDED])
def test_a_recording_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An error within a capture may come from the driver, so it counts as a failed capture, which another call tries
    again."""
    fails(monkeypatch, {**AFTER_THE_BODY, **RECORDED}[name], 2, is_told=EXECUTES or name in RECORDED)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("call", [1, 2, 4], ids=["watched", "recorded", "replayed"])
@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> None:
    if call == 4 and name in ("sum", "backward"):
        call = 2  # of the calls after the first two, which replay, none runs these
    fails(monkeypatch, BACKWARD[name], call, is_told=EXECUTES or name != "sum" or call == 1)


def test_a_backward_pass_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads have the process's settings alone, and autograd's are such: those of the forward pass count."""
    mine, theirs = twins(Net)
    weight = torch.eye(6, device=DEVICE).requires_grad_()
    capture(mine)
    for number in range(STEPS):
        x, y = (inputs(number).requires_grad_() for _ in range(2))
        torch.manual_seed(number)
        loss = mine(x, weight)[0].square().sum()
        torch.manual_seed(number)
        expected = theirs(y, weight)[0].square().sum()
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
            left = once(patch, Frame, "_of_inputs") if number == STEPS - 1 else []
            threads.submit(loss.backward).result()
            assert not left
        expected.backward()
        assert x.grad is not None
        assert y.grad is not None
        assert bits(x.grad) == bits(y.grad), number
    assert [finding.code for finding in recordings(mine).findings if finding.code == "CG905"] == ["CG905"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", [(training_region, "_parted"), (Region, "is_measured")], ids=["begin", "end"])
def test_a_replay(monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]) -> None:
    assert fails(monkeypatch, where, 4).replays >= 4


@pytest.mark.skipif(not EXECUTES, reason="a capture executes nothing: the body runs once more")
def test_gradients_of_gradients_and_writes_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault second derivatives of the call's results, and writes to them, raise; no other values come out."""
    for write in (False, True):
        mine, theirs = twins(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
        capture(mine)
        mine(inputs(0).requires_grad_()).sum().backward()
        with monkeypatch.context() as patch:
            left = once(patch, GraphSaver, "_find_saved")
            x = inputs(1).requires_grad_()
            y = mine(x)
        assert not left
        if write:
            with torch.no_grad():
                mine[2].weight.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            continue
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        assert bits(first) == bits(torch.autograd.grad(theirs(x).square().sum(), x)[0])
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.sum().backward()


def test_what_a_users_function_raises_comes_out_once() -> None:
    """A user's function that raises in the backward pass runs once, and no finding blames this library."""
    ran: list[int] = []

    class Raising(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @override
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append(1)
            raise KeyError("the user's")

    apply: Any = Raising.apply
    f = capture(lambda x: apply(x) + 1)
    for number in range(5):
        ran.clear()
        with pytest.raises(KeyError, match="the user's"):
            f(inputs(number).requires_grad_()).sum().backward()
        assert ran == [1], number
    assert not [finding.code for finding in recordings(f).findings if finding.code == "CG905"]
