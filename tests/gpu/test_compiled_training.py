"""Training through functions that Inductor compiled, whose buffers are made by no operator that torch reports."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, capture, config, mark_step_begin, recordings
from tests.gpu.support import DEVICE, needs_cuda, rand, same

STEPS = 10


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.enable_grad(), config.patch(cache=False):
        yield


def net() -> nn.Module:
    """A model whose compiled code saves activations and views of them, and has matrix products outside of its
    kernels."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers).to(DEVICE)


class World:
    """One model and its optimizer, with or without recordings."""

    def __init__(self, model: nn.Module, kind: str, gradients: Literal["autograd", "accumulate"]) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=DEVICE), capturable=True)
        self.forward: Any = torch.compile(model)
        self.step: Any = self._step
        if kind == "region":
            compiled = self.forward
            self.forward = capture(lambda x: compiled(x), gradients=gradients)
        elif kind == "whole step":

            def step(x: Tensor) -> Tensor:
                return self._step(x)

            self.step = capture(step)

    def _step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.forward(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@needs_cuda
@pytest.mark.parametrize(
    ("kind", "gradients"), [("region", "autograd"), ("region", "accumulate"), ("whole step", None)]
)
def test_training_is_recorded(kind: str, gradients: Any) -> None:
    first = net()
    theirs, ours = World(copy.deepcopy(first), "compiled", "autograd"), World(first, kind, gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for step in range(STEPS):
            x = rand(32, 64, seed=step)
            losses = []
            for world in (theirs, ours):
                mark_step_begin()
                losses.append(world.step(x).clone())
            same(*losses)
            for mine, its in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
                same(mine, its)
                assert mine.grad is not None
                assert its.grad is not None
                same(mine.grad, its.grad)
    counted = recordings(ours.step if kind == "whole step" else ours.forward)
    assert counted.replays >= STEPS - 6, (counted, [(finding.code, finding.what) for finding in counted.findings])


class Pieces(nn.Module):
    """A model compiled in several pieces, with operators between them, which saves integers too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.sources = nn.Embedding(256, 64), nn.Embedding(256, 64)
        self.first, self.second = (nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 4096, bias=False)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        at = torch.cumsum(torch.ones_like(ids), 1) - 1
        x = self.tokens(ids) + self.sources(at)
        x = x + self.first(x)
        torch._dynamo.graph_break()
        x = _in_between(self.norm(x))
        x = x + self.second(x)
        return self.head(x)  # type: ignore[no-any-return]


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _in_between(x: Tensor) -> Tensor:
    rows = x.squeeze(0)
    return (torch.mm(rows, rows.t()).softmax(-1) @ rows)[None]


def ids_of(seed: int) -> Tensor:
    """Token ids, each once: the gradients of a row that comes twice would be added in any order."""
    return torch.randperm(256, generator=torch.Generator().manual_seed(seed))[None, :96].to(DEVICE)


@needs_cuda
@pytest.mark.parametrize("gradients", ["autograd", "accumulate"])
@pytest.mark.parametrize("verify", ["off", "first"])
def test_gradients_that_move(gradients: Any, verify: Any) -> None:
    """The logits' gradient has 1.5 MiB and is read in place. At its first move the pass is compared with eager, before
    which memory that the compiled backward pass wrote is restored."""
    torch.manual_seed(0)
    model = Pieces().to(DEVICE)
    compiled: Any = torch.compile(model)
    ours = capture(lambda ids: compiled(ids), gradients=gradients, verify=verify)
    inputs = [ids_of(seed) for seed in range(3)]

    def step(call: Any, ids: Tensor) -> list[Tensor]:
        model.zero_grad()
        mark_step_begin()
        logits = call(ids)
        (logits.float().square().mean() * ids.shape[1]).backward()
        return [
            logits.detach().clone(),
            *[parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        ]

    expected = [step(compiled, ids) for ids in inputs]
    kept = []  # so that the allocator gives other addresses
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for turn in range(4 * len(inputs)):
            kept.append(rand(96, 4096, seed=turn))
            same(step(ours, inputs[turn % 3]), expected[turn % 3])
    counted = recordings(ours)
    assert counted.replays >= 12, (counted, [(finding.code, finding.what) for finding in counted.findings])


@needs_cuda
def test_an_argument_that_several_pending_graphs_have_saved() -> None:
    """Compiled kernels might write the argument, as nothing tells what they write; autograd must not take that for a
    write to tensors that pending graphs saved."""
    torch.manual_seed(0)
    model = Pieces().to(DEVICE)
    compiled: Any = torch.compile(model)
    ours, ids = capture(lambda ids: compiled(ids)), ids_of(0)

    def step(call: Any) -> list[Tensor]:
        model.zero_grad()
        mark_step_begin()
        before = model.tokens(ids)
        first, second = call(ids), call(ids)
        (before.sum() + first.square().mean() + second.mean()).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = step(compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for _ in range(6):
            same(step(ours), expected)
    assert recordings(ours).replays >= 4, [(finding.code, finding.what) for finding in recordings(ours).findings]
