"""``make_graphed_callables`` on a device, beside torch's own where torch's gives wrong gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from capture import recordings
from capture.integrations.graphed import make_graphed_callables
from tests.gpu.support import DEVICE, needs_cuda, needs_gpu, rand, rng_state, same

pytestmark = needs_gpu


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)).to(DEVICE)


def accumulated(model: nn.Module, number: int) -> list[Tensor]:
    """Gradients of three micro-batches, accumulated from None."""
    model.zero_grad(set_to_none=True)
    for part in range(3):
        model(rand(16, 64, seed=10 * number + part)).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    return [one.clone() for one in found if one is not None]


@needs_cuda
def test_gradients_accumulate_where_torchs_function_loses_them() -> None:
    """With torch's function ``.grad`` becomes the buffer into which later backward passes of its graph write: the sum
    then holds the last micro-batch's gradients twice, and none of the others. Ours adds up all."""
    eager, ours, theirs = mlp(), mlp(), mlp()
    make_graphed_callables(ours, (rand(16, 64),))
    torch.cuda.make_graphed_callables(theirs, (rand(16, 64),))
    for number in range(6):
        expected = accumulated(eager, number)
        same(accumulated(ours, number), expected)
        wrong = accumulated(theirs, number)
        assert not all(torch.allclose(grad, right) for grad, right in zip(wrong, expected, strict=True))


def test_the_first_call_replays_and_no_trace_is_left() -> None:
    ours = mlp()
    theirs = copy.deepcopy(ours)
    before = rng_state()
    make_graphed_callables(ours, (rand(16, 64),))
    same(rng_state(), before)
    same([*ours.state_dict().values()], [*theirs.state_dict().values()])
    assert all(p.grad is None for p in ours.parameters())
    runs = recordings(ours).body_runs
    for number in range(6):
        same(accumulated(ours, number), accumulated(theirs, number))
        same([*ours.state_dict().values()], [*theirs.state_dict().values()])
    assert recordings(ours).body_runs == runs


def test_other_shapes_and_late_backward_passes() -> None:
    ours = mlp()
    theirs = copy.deepcopy(ours)
    make_graphed_callables(ours, (rand(16, 64),))
    for number in range(12):
        rows = (16, 8)[number % 2]
        grads = []
        for module in (ours, theirs):
            module.zero_grad()
            losses = [module(rand(rows, 64, seed=10 * number + part)).square().mean() for part in range(3)]
            for loss in losses:
                loss.backward()
            grads.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        same(grads[0], grads[1])
