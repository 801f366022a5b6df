"""Islands (functions that run eagerly in every replay) on a GPU: streams, syncs, memory that one keeps, host values and
errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import capture, island, recordings
from tests.gpu.support import DEVICE, needs_cuda, rand, same

pytestmark = needs_cuda


def deep(x: Tensor) -> Tensor:
    """Several kernels."""
    for _ in range(4):
        x = torch.tanh(x * 1.5)
    return x


def test_an_island_runs_on_the_stream_of_its_caller() -> None:
    seen: list[int] = []

    @island
    def note(y: Tensor) -> Tensor:
        seen.append(torch.cuda.current_stream().cuda_stream)
        return y * 2

    @capture
    def f(x: Tensor) -> Tensor:
        return deep(note(deep(x)))

    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    with torch.no_grad():
        for number in range(9):
            x, stream = rand(64, 64, seed=number), streams[number % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = f(x)
                expected = deep(deep(x) * 2)
            torch.cuda.current_stream().wait_stream(stream)
            same(result, expected)
            assert seen[-1] == stream.cuda_stream
    assert recordings(f).replays >= 5, str(recordings(f))


def test_what_an_island_waits_for_is_no_read_of_the_body() -> None:
    log: list[float] = []

    @island
    def note(y: Tensor) -> None:
        torch.cuda.synchronize()
        log.append(y.max().item())

    @capture
    def f(x: Tensor) -> Tensor:
        y = deep(x)
        note(y)
        return deep(y)

    with torch.no_grad():
        inputs = [rand(8, 8, seed=number) for number in range(8)]
        for x in inputs:
            same(f(x), deep(deep(x)))
    assert log == [deep(x).max().item() for x in inputs]
    assert recordings(f).replays >= 5, str(recordings(f))


# a recording run whose tensor is kept makes no recording
@pytest.mark.filterwarnings("ignore:CG904:capture.CaptureWarning")
def test_what_an_island_keeps_stays_as_it_was() -> None:
    """In its last calls the island keeps a tensor, which is memory of the recording: the pool is given up."""
    kept: list[Tensor] = []
    calls: list[int] = []

    @island
    def note(y: Tensor) -> None:
        if len(calls) > 5:
            kept.append(y)

    @capture
    def f(x: Tensor) -> Tensor:
        y = deep(x)
        note(y)
        return deep(y)

    with torch.no_grad():
        inputs = [rand(8, 8, seed=number) for number in range(12)]
        for x in inputs:
            same(f(x), deep(deep(x)))
            calls.append(0)
    for result, x in zip(kept, inputs[6:], strict=True):
        same(result, deep(x))


def test_what_an_island_writes_on_the_host_is_copied_again() -> None:
    scale = torch.ones((), device="cpu")
    due: list[float] = []

    @island
    def change(y: Tensor) -> None:
        if due:
            scale.fill_(due[0] * 1.0)

    def body(x: Tensor) -> Tensor:
        y = deep(x) * scale
        change(y)
        return deep(y) * scale

    f = capture(body)
    with torch.no_grad():
        for number in range(10):
            due[:] = [] if number < 5 else [number / 4]
            x, before = rand(8, 8, seed=number), scale.clone()
            expected = body(x)
            scale.copy_(before)
            same(f(x), expected)


@torch.enable_grad()
def test_a_step_of_adam_takes_the_state_that_eager_takes() -> None:
    def make() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)).to(DEVICE)
        optimizer = torch.optim.AdamW(net.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return loss.detach()

        return step, net, optimizer

    (eager, theirs, _), (ours, net, _) = make(), make()
    f = capture(ours)
    for number in range(16):
        x, state = rand(32, 64, seed=number), torch.cuda.get_rng_state()
        expected, after = eager(x), torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        same(f(x), expected)
        assert torch.equal(torch.cuda.get_rng_state(), after), number
        assert all(map(torch.equal, theirs.state_dict().values(), net.state_dict().values())), number
    assert recordings(f).replays >= 9, str(recordings(f))
