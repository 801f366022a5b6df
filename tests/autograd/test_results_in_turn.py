"""Results of one region that are differentiated one after another, with what is above their inputs, and of which
gradients of gradients are asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
CALLS = 10
Step = Callable[[Any, Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with config.patch(cache=False, drop_slow=False):
        yield


class Heads(nn.Module):
    """Results that lead to different inputs, or to the same ones by nodes of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    @override
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        if self.kind == "apart":
            return torch.tanh(self.a(x)), torch.tanh(self.b(y))
        if self.kind == "both":
            return torch.tanh(self.a(x + y)), torch.sigmoid(self.b(x + y))
        if self.kind == "and one of both":
            return torch.tanh(self.a(x)), torch.tanh(self.b(y)), (x * y).sin()
        if self.kind == "nothing saved":
            return -x, y + 1, x + y
        if self.kind == "views":
            return (*(-x).unbind(0), *(y + 1).unbind(0))
        if self.kind == "sums":
            return x.sum(), (y * y).sum(), x.mean(0), (x * x).sum(), self.a(x).sum()
        if self.kind == "to and fro":
            first, second = x * 2, x * y
            return second * 3, first.sin(), y + 1, (second + 1)
        first = torch.tanh(self.a(x))
        return first, first.detach() * torch.tanh(self.b(y))


KINDS = {
    "apart": 2, "both": 2, "and one of both": 3, "detached": 2,
    "nothing saved": 3, "views": 6, "sums": 5, "to and fro": 4,
}  # fmt: skip
"""With the number of results."""


def twins(
    kind: str, step: Callable[[int], Step], *, above: bool, calls: int = CALLS, outside: bool = False,
    exact: bool = True,
) -> Any:  # fmt: skip
    """Calls beside eager ones. ``above``: inputs have graphs of their own, which a pass frees. ``outside``: the caller
    uses the inputs after the call, too; what it computes are two results more."""
    torch.manual_seed(0)
    ours, eager = Heads(kind).to(DEVICE), Heads(kind).to(DEVICE)
    ours.load_state_dict(eager.state_dict())
    captured = capture(ours)
    for number in range(calls):
        found = []
        for module, function in ((eager, eager), (ours, captured)):
            torch.manual_seed(number)
            module.zero_grad()
            x, y = (torch.randn(3, 4, device=DEVICE).requires_grad_() for _ in range(2))
            arguments = (x * 0.7, y * 1.3) if above else (x, y)
            results = function(*arguments)
            results = (*results, *(one * 0.3 for one in arguments)) if outside else results
            told = step(number)(results, x, y)
            gradients = [one.grad for one in (x, y, *module.parameters())]
            found.append((told, [None if one is None else one.tolist() for one in gradients]))
        if exact:
            assert found[1] == found[0], number
        else:
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    return recordings(captured)


def in_turn(results: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
    told = []
    for result in results:
        try:
            result.sum().backward()
        except RuntimeError:  # eager raises where two results share what is above their inputs
            told.append("freed")
    return told


def higher_after(results: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
    """A penalty of gradients of one result, once the pass from another one is over."""
    results[0].sum().backward()
    (gradient,) = torch.autograd.grad(results[1].sum(), y, create_graph=True)
    gradient.square().sum().backward()


def higher_of_all(results: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
    """The last pass comes to one result by itself, and to all by gradients of gradients."""
    results[0].sum().backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(results[1].sum() + results[0].sum(), y, create_graph=True)
    (gradient.sum() + results[1].sum()).backward()


@pytest.mark.parametrize("above", [False, True], ids=["leaves", "computed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_from_one_result_frees_nothing_of_another(kind: str, above: bool) -> None:
    counters = twins(kind, lambda _: in_turn, above=above)
    assert counters.replays > 0


@pytest.mark.parametrize("above", [False, True], ids=["leaves", "computed"])
@pytest.mark.parametrize("kind", ["apart", "detached"])
@pytest.mark.parametrize("step", [higher_after, higher_of_all])
def test_gradients_of_gradients_beside_other_results(step: Step, kind: str, above: bool) -> None:
    """From the seventh call on. On a GPU autograd numbers nodes that a backward pass makes by its own thread, so that
    one pass may come to the region before it comes to them: sums of both are rounded once more."""
    exact = DEVICE.type == "cpu" or step is not higher_of_all
    twins(kind, lambda number: in_turn if number < 6 else step, above=above, exact=exact)


def passes(drawn: random.Random, count: int) -> Step:
    """First-order passes from some of the results, in any order."""
    plan = [(drawn.sample(range(count), drawn.randint(1, count)), drawn.random() < 0.5) for _ in range(3)]

    def step(results: Sequence[Tensor], x: Tensor, y: Tensor) -> Any:
        told: list[Any] = []
        for picked, retains in plan:
            loss = sum((results[at] * (at + 1)).sum() for at in picked)
            assert isinstance(loss, Tensor)
            try:
                found: Sequence[Any] = torch.autograd.grad(loss, [x, y], retain_graph=retains, allow_unused=True)
                told.append([None if one is None else one.tolist() for one in found])
            except RuntimeError:
                told.append("freed")
        return told

    return step


@pytest.mark.one_in(6)
@pytest.mark.parametrize("above", [False, True], ids=["leaves", "computed"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_any_passes(kind: str, seed: int, above: bool) -> None:
    drawn, outside = random.Random(seed), seed % 2 == 1
    plans = [passes(drawn, KINDS[kind] + 2 * outside) for _ in range(3)]
    twins(
        kind, lambda number: plans[number % 3] if number > 4 else in_turn, above=above, calls=14, outside=outside,
    )  # fmt: skip
