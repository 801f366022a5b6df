"""Tensors that become one, or part, between two calls: weights that are tied, and views whose memory moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, config, recordings
from tests.support.device import DEVICE


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No plans on disk."""
    with config.patch(cache=False):
        yield


class Two(nn.Module):
    """Two weights, and others that the body asks for without computing with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
        self.saved: Any = torch.full((4,), 3.0)
        self.kept: Any = [torch.full((4,), 4.0)]

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x * self.a + torch.tanh(self.b)
        if self.a is self.saved or any(one is self.b for one in self.kept):
            y = y * 2
        return y


def step_of(model: Two) -> Callable[[Tensor], Tensor]:
    """A training step in which two gradients of one weight are not as one gradient of the sum."""

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().sum()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(weight.grad / (1 + weight.grad.norm()), alpha=0.1)
                weight.grad = None
        return loss.detach()

    return step


def _as_it_is(body: Any) -> Any:
    return body


def another(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone())


def set_(name: str, make: Callable[[Two], Any]) -> Callable[[Two], None]:
    return lambda model: setattr(model, name, make(model))


def data(name: str, make: Callable[[Two], Tensor]) -> Callable[[Two], None]:
    return lambda model: setattr(getattr(model, name), "data", make(model))


TIED = set_("b", lambda model: model.a)
UNTIED = set_("b", lambda model: another(model.b))
MOVED = set_("a", lambda model: another(model.a))
SHARED = data("b", lambda model: model.a.data)
ON_A_PART = data("b", lambda model: model.a.data[:])
APART = data("b", lambda model: torch.full((4,), 5.0))
APART_TOO = data("a", lambda model: torch.full((4,), 6.0))
STRIDED = data("b", lambda model: model.a.data[:1].expand(4))


def run(body: Callable[[Tensor], Tensor], model: Two, changes: list[Callable[[Two], None]]) -> list[Tensor]:
    told = []
    for change in (lambda _: None, *changes):
        with torch.no_grad():
            change(model)
        for number in range(5):
            told.append(body(torch.full((4,), 0.1 * (number + 1))).detach().clone())
            told += [weight.detach().clone() for weight in (model.a, model.b)]
    return told


@pytest.mark.one_in(4)
@pytest.mark.parametrize("of", [step_of, lambda model: model], ids=["whole step", "no gradients"])
@pytest.mark.parametrize(
    "changes",
    [
        [UNTIED, TIED, UNTIED], [TIED, UNTIED, TIED], [UNTIED, MOVED, TIED, MOVED], [SHARED, APART, SHARED],
        [APART, SHARED, APART_TOO], [UNTIED, ON_A_PART, APART_TOO], [SHARED, STRIDED, MOVED],
    ],
    ids=[
        "tied after a move", "tied at once", "both moved", "one memory", "moved onto it", "on a view", "other strides",
    ],
)  # fmt: skip
def test_weights_that_are_tied_and_untied(of: Any, changes: list[Callable[[Two], None]]) -> None:
    is_step = of is step_of
    if is_step and STRIDED in changes:
        changes = [one for one in changes if one is not STRIDED]  # such a weight cannot be written in place
    models = Two(), Two()
    bodies = of(models[0]), capture(of(models[1]))
    with torch.set_grad_enabled(is_step):
        eager, ours = (run(body, model, changes) for body, model in zip(bodies, models, strict=True))
    assert len(eager) == len(ours)
    assert all(map(torch.equal, eager, ours))
    assert recordings(bodies[1]).replays >= 2 * len(changes)


@pytest.mark.parametrize(
    "tie",
    [
        set_("a", lambda model: model.saved),
        set_("saved", lambda model: model.a),
        set_("b", lambda model: model.kept[0]),
        lambda model: model.kept.insert(0, model.b),
    ],
    ids=["the one becomes the other", "the other becomes the one", "one of a list", "a list gets it"],
)
def test_a_comparison_by_identity(tie: Callable[[Two], None]) -> None:
    told = []
    for keep in (_as_it_is, capture):
        model: Any = Two().requires_grad_(False)
        del model.a, model.b
        model.a, model.b = torch.ones(4), torch.full((4,), 2.0)
        moved = set_("a", lambda model: model.a.clone()), set_("b", lambda model: model.b.clone())
        with torch.no_grad():
            told.append(run(keep(model), model, [*moved, tie, *moved]))
    assert all(map(torch.equal, *told))


def test_a_view_whose_memory_moves_alone() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = torch.ones(8, device=DEVICE)
            self.part, self.other = self.whole[:4], self.whole[4:]

        @override
        def forward(self, x: Tensor) -> Tensor:
            return x * self.part + self.other

    def move(model: Any, name: str, value: float) -> None:
        getattr(model, name).data = torch.full((4,), value)

    told = []
    for keep in (_as_it_is, capture):
        model: Any = Views()
        body, values = keep(model), list[Tensor]()
        with torch.no_grad():
            for name, value in (("part", 2.0), ("other", 3.0), ("part", 4.0)):
                values += [body(torch.ones(4)).clone() for _ in range(4)]
                move(model, name, value)
            values += [body(torch.ones(4)).clone() for _ in range(4)]
        told.append(values)
    assert all(map(torch.equal, *told))
