"""``.data =`` gives a parameter another shape, as where embeddings are resized, layers grow or channels are pruned.
Autograd takes no gradient of another shape as long as a graph that was made before is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import both, twins
from tests.support.regions import fresh as fresh

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")


class Tied(nn.Module):
    """The weight of the embedding is that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.n, self.head = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.e.weight

    @override
    def forward(self, ids: Tensor) -> Tensor:
        y = self.head(self.n(self.e(ids)))
        return F.cross_entropy(y.flatten(0, 1), ids.flatten())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)))
        return out


def resized(weight: Tensor, rows: int) -> Tensor:
    return torch.cat([weight.data, torch.ones(rows, *weight.shape[1:], device=DEVICE)])


def trained(model: Any, loss: Tensor) -> list[Any]:
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for one in model.parameters():
            one.sub_(one.grad * 0.1)
    return [loss.detach()]


@pytest.mark.parametrize("at", [3, 10])
def test_embeddings_are_resized(at: int) -> None:
    mine, theirs = twins(Tied)
    capture(mine)

    def step(model: Any, number: int) -> list[Any]:
        if number == at:
            model.e.weight.data = resized(model.e.weight, 2)
        ids = torch.randint(0, 6, (2, 3), generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        return trained(model, model(ids))

    both(step, mine, theirs, 18)
    assert recordings(mine).replays >= 8


@pytest.mark.parametrize("parts", [False, True])
def test_a_layer_grows_and_shrinks(parts: bool) -> None:
    """Captured as a whole, or layer by layer, where several functions know the weights."""
    mine, theirs = twins(Wide)
    for one in (mine.a, mine.b, mine) if parts else (mine,):
        capture(one)

    def step(model: Any, number: int) -> list[Any]:
        if number % 9 == 4:
            model.a.weight.data, model.a.bias.data = resized(model.a.weight, 1), resized(model.a.bias, 1)
            model.b.weight.data = torch.cat([model.b.weight.data, torch.ones(3, 1, device=DEVICE)], 1)
        if number % 9 == 8:
            model.a.weight.data, model.a.bias.data = model.a.weight.data[:6].clone(), model.a.bias.data[:6].clone()
            model.b.weight.data = model.b.weight.data[:, :6].clone()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        whole = model(x)  # the next call of a captured function lets go of what ends at the old shapes
        hidden = torch.relu(model.a(x))
        return trained(model, whole.square().mean() + model.b(hidden).mean())

    both(step, mine, theirs, 27)


def test_gradients_of_such_a_weight() -> None:
    mine, theirs = twins(Wide)
    capture(mine)

    def step(model: Any, number: int) -> list[Any]:
        if number == 6:
            model.b.weight.data, model.b.bias.data = resized(model.b.weight, 2), resized(model.b.bias, 2)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number), device="cpu").to(DEVICE)
        return [*torch.autograd.grad(model(x).square().sum(), [model.b.weight, model.a.bias])]

    both(step, mine, theirs, 14)
