"""Models and twins for tests of the backend of ``torch.compile``."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import recordings
from capture.integrations.compile import backend, graphs
from tests.support.device import DEVICE
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand

STEPS = 5  # watched, recorded, three replays


M = TypeVar("M", bound=nn.Module)
_before: set[Any] = set()


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Reset Dynamo before and after each test, and note earlier graphs, which ``made`` leaves out: Dynamo keeps code
    before a graph break in a module's globals."""
    torch.compiler.reset()
    gc.collect()
    _before.update(graphs())
    yield
    _before.clear()
    torch.compiler.reset()


def made(name: str = "") -> list[Any]:
    """Graphs of this test."""
    return [graph for graph in graphs(name) if graph not in _before]


def compiled(target: Any, **options: Any) -> Any:
    return torch.compile(target, backend=backend, **options)


def counts(name: str = "") -> dict[str, tuple[int, int, int]]:
    """Recordings, replays and eager calls, by the name of the graph."""
    return {g.__name__: (n.recordings, n.replays, n.eager_calls) for g in made(name) for n in [recordings(g)]}


def only(name: str = "") -> Any:
    """Counters of the only graph whose name ends with this."""
    found = [graph for graph in made() if graph.__name__.endswith(name)]
    assert len(found) == 1, [graph.__name__ for graph in made()]
    return recordings(found[0])


def replayed(part: str, replays: int = STEPS - 2, recorded: int = 1) -> None:
    """Check that the only graph of this part was replayed so often, and never ran eagerly."""
    now = only(part)
    assert (now.recordings, now.replays, now.eager_calls) == (recorded, replays, 0)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.first(x)), 0.3, training=True)


def ids(seed: int) -> Tensor:
    return torch.randint(0, 10, (3, 4), generator=torch.Generator(DEVICE).manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (Mlp, lambda seed: rand(4, 8, seed=seed)),
    "block": (Block, lambda seed: rand(2, 5, 8, seed=seed)),
    "conv": (ConvNorm, lambda seed: rand(2, 2, 6, 6, seed=seed)),
    "words": (Words, ids),
}


def twins(make: Callable[[], M]) -> tuple[M, M]:
    torch.manual_seed(0)
    net = make()
    return net, copy.deepcopy(net)


def train(net: Any, parameters: nn.Module, inputs: Callable[[int], Tensor], steps: int = STEPS) -> list[Tensor]:
    """Train for some steps; gives the losses and then the state."""
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1, momentum=0.9)
    left = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        left.append(loss.detach().clone())
    return [*left, *parameters.state_dict().values()]
