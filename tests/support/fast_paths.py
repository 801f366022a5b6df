"""Functions to capture, and the ways that they are called, for tests of the fast path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import config
from capture.api.decorator import captured_states
from capture.native import MISS, native
from capture.torch_private import tensor_reads
from capture.tree import thread_trees
from tests.support.device import DEVICE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with config.patch(cache=False):
        yield


@pytest.fixture(params=["fast path", "fast path without the ABI", "general way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How functions that are captured from here on are called; the fast path with torch's C ABI or without."""
    kind: str = request.param
    if kind == "general way":
        monkeypatch.setattr("capture.runtime.fast_path._path", lambda *_: None)
    if kind == "fast path without the ABI":
        assert tensor_reads.reads_tensors()
        monkeypatch.setattr(tensor_reads, "reads_tensors", lambda: False)
        monkeypatch.setattr("capture.tree.liveness.counts_holders", lambda: False)
        monkeypatch.setattr("capture.tree.outputs.counts_holders", lambda: False)
        native.forget_abi()
    yield kind
    if kind == "fast path without the ABI":
        tensor_reads._set_up()


def scaled(x: Tensor, y: Tensor, factor: float = 2.0, *, shift: float = 1.0) -> Tensor:
    return x * factor + y + shift


def tensors(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2, *(shape or (4,)), generator=generator, device="cpu").to(DEVICE)
    return made[0].clone(), made[1].clone()


def goes_straight(function: Callable[..., Any], *args: Any) -> bool:
    """Whether C makes this call without Python."""
    return captured_states(function)[0].straight(*args) is not MISS


def refused(function: Any, *args: Any) -> None:
    with pytest.raises(TypeError):
        function(*args)


class Named:
    """A body that reads numbers, tensors and modules in each way that a body can name them."""

    def __init__(self) -> None:
        self.scale: Any = 2.0
        self.weight: Any = torch.full((4,), 3.0, device=DEVICE)
        self.net: Any = nn.Linear(4, 4, device=DEVICE)

    def call(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x * self.scale) + self.weight
        return y
