"""Models, tracers and checks for tests of graph modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from capture.integrations.fx import CapturedGraph
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same

STEPS = 5  # watched, recorded, three replays
Graph = torch.fx.GraphModule
Inputs = Callable[[int], tuple[Any, ...]]


def traced(function: Any) -> Graph:
    return torch.fx.symbolic_trace(function)


def built(fill: Callable[[torch.fx.Graph], Any], root: Any = None) -> Graph:
    """A graph module made by hand: ``fill`` adds nodes and gives the output."""
    graph = torch.fx.Graph()
    graph.output(fill(graph))
    return Graph({} if root is None else root, graph)


def equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    same(*(list(one.items()) if isinstance(one, dict) else one for one in (found, expected)))


def like(captured: CapturedGraph, twin: Any, inputs: Inputs, steps: int = STEPS) -> None:
    """Check that outputs, and inputs after the call, equal the twin's in every call."""
    for seed in range(steps):
        ours, theirs = inputs(seed), inputs(seed)
        equal(captured(*ours), twin(*theirs))
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, Tensor):
                same(one, other)


def counts(captured: CapturedGraph) -> list[tuple[int, int, int]]:
    """Recordings, replays and eager calls of each captured piece."""
    return [(now.recordings, now.replays, now.eager_calls) for now in captured.recordings()]


ALL_REPLAYED = (1, STEPS - 2, 0)


class Reads(nn.Module):
    """Reads a number on the host between two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        found = torch.nonzero(y > 0)
        return self.second(y).sin() + found.sum() * 0  # type: ignore[no-any-return]


TRACERS: dict[str, Callable[[nn.Module, tuple[Any, ...]], Graph]] = {
    "symbolic_trace": lambda net, inputs: traced(net),
    "export": lambda net, inputs: torch.export.export(net, inputs).module(),
    "export.graph_module": lambda net, inputs: torch.export.export(net, inputs).graph_module,
    "make_fx": lambda net, inputs: make_fx(net)(*inputs),
}


def batch(seed: int) -> tuple[Any, ...]:
    return (rand(4, 8, seed=seed),)


def of_python(x: Tensor) -> Tensor:
    """A Python function that stays a node. A file that traces it calls ``torch.fx.wrap("of_python")``, as tracers know
    it by its name there."""
    return x * 2


def item(x: Tensor) -> Tensor:
    y = x.sin() * 2
    return y + x.abs().max().round().item()
