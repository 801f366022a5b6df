"""Reports name a module by its path in the model that holds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, report
from capture.api.module_paths import module_paths
from tests.support.device import EXECUTES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @capture
    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(3, 3), nn.ModuleList(Block() for _ in range(3))

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_the_path_in_the_largest_model() -> None:
    model, alone = Model(), Block()
    wrapped = nn.Sequential(model.blocks[1])
    assert module_paths([model.blocks[0], model.blocks[1], alone, model, None, 3]) == [
        "blocks.0", "blocks.1", "", "", "", "",
    ]  # fmt: skip
    assert module_paths([wrapped[0]]) == ["blocks.1"]
    assert module_paths([]) == []


def test_a_report_names_them_together() -> None:
    model = Model()
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(2, 3))
    made = report()
    assert f"{__name__}.Block.forward (blocks.0-2), 3 instances" in made
    (entry,) = (function for function in made.data.functions if function.paths == ("blocks.2",))
    assert entry.recordings[0].widths == ((1, 1) if EXECUTES else ()), (
        "no operator is watched while a graph is captured"
    )


def test_a_circle_of_modules_ends() -> None:
    outer = nn.Module()
    outer.inner = nn.Module()
    outer.inner.outer = outer
    assert module_paths([outer.inner]) == [""]  # no module holds the two from outside
