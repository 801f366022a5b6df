"""Memory of captured training steps: memory from eager steps before is given back, and gradients exist once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, config, mark_step_begin, recordings, reset, warmup
from capture.engines.cuda.capture_graph import RefusedError
from capture.engines.cuda.recorder import GraphRecorder
from capture.runtime import gradient_offload
from capture.tree import thread_trees

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH = 2048  # 16 MiB a weight


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.enable_grad(), config.patch(cache=False, poison=False), torch.device("cuda"):
        yield
    reset()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)])


def step_of(net: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, **options)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batches() -> Iterator[Tensor]:
    for number in range(6):
        yield torch.randn(64, WIDTH, generator=torch.Generator("cuda").manual_seed(number))


def most(run: Any) -> tuple[int, list[float]]:
    """The most bytes that torch reserved on the device, and the losses."""
    gc.collect()
    # makes cuBLAS's workspaces for eager code and for recordings, so that both sides have them
    square = capture(lambda x: x @ x)
    for _ in range(3):
        square(torch.ones(8, 8))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for x in batches():
        mark_step_begin()
        losses.append(run(x).item())
    return torch.cuda.max_memory_reserved() - before, losses


def test_a_whole_step_takes_eagers_memory() -> None:
    net = model()
    eager, expected = most(step_of(net))
    del net
    net = model()
    captured = capture(step_of(net))
    mine, loss = most(captured)
    assert loss == expected
    assert recordings(captured).replays >= 3
    assert mine <= 1.06 * eager, (mine >> 20, eager >> 20)


def weights(net: nn.Module) -> list[list[float]]:
    return [one.detach().flatten()[:100].tolist() for one in net.parameters()]


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_gradients_come_back_where_the_recording_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = model()
    theirs = copy.deepcopy(mine)
    captured, eager = capture(step_of(mine)), step_of(theirs)
    parked: list[int] = []
    park = gradient_offload.OffloadedGradients.park

    def noted(self: Any, storages: list[torch.UntypedStorage]) -> None:
        parked.append(len(storages))
        park(self, storages)

    launch = GraphRecorder._launch

    def stops(recorder: Any, *args: Any) -> Any:
        if len(recorder.trace.sequence) == 20:
            raise RefusedError("this test ends it")
        return launch(recorder, *args)

    monkeypatch.setattr(gradient_offload.OffloadedGradients, "park", noted)
    monkeypatch.setattr(GraphRecorder, "_launch", stops)
    for x in batches():
        assert torch.equal(captured(x), eager(x))
        assert all(
            torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True)
        )
    assert parked
    assert set(parked) == {8}
    assert weights(mine) == weights(theirs)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_gradients_that_raise_half_way_are_what_they_were() -> None:
    """The body raises in its recording before it drops the old gradients: they stay."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    raises = [False]

    def step(x: Tensor) -> Tensor:
        if raises[0]:
            raise ValueError("on purpose")
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture(step)
    given = list(batches())
    for x in given[:2]:
        captured(x)
    before = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    raises[0] = True
    with pytest.raises(ValueError, match="on purpose"):
        captured(given[2])
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(net.parameters(), before, strict=True))  # type: ignore[arg-type]


def test_gradients_that_somebody_holds_stay() -> None:
    mine = model()
    theirs = copy.deepcopy(mine)
    captured, eager = capture(step_of(mine)), step_of(theirs)
    held: list[Any] = []
    for number, x in enumerate(batches()):
        mark_step_begin()
        assert torch.equal(captured(x), eager(x))
        held.append(
            (
                [parameter.grad for parameter in mine.parameters()][: number + 1],
                [parameter.grad for parameter in theirs.parameters()],
            )
        )
        mine[0].weight.grad, theirs[0].weight.grad = mine[0].weight.grad, theirs[0].weight.grad
        for ours, right in held:
            assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=False))
    assert weights(mine) == weights(theirs)


def test_a_warm_up_leaves_gradients_alone() -> None:
    mine = model()
    theirs = copy.deepcopy(mine)
    captured, eager = capture(step_of(mine)), step_of(theirs)
    first, *following = batches()
    assert torch.equal(captured(first), eager(first))
    assert torch.equal(captured(first), eager(first))
    old = [parameter.grad.clone() for parameter in mine.parameters() if parameter.grad is not None]
    warmup(captured)(first)
    assert all(torch.equal(parameter.grad, was) for parameter, was in zip(mine.parameters(), old, strict=True))  # type: ignore[arg-type]
    for x in following:
        mark_step_begin()
        assert torch.equal(captured(x), eager(x))
    assert weights(mine) == weights(theirs)
