"""Two processes under NCCL, a GPU each: the programs that `tests/distributed` runs under gloo."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from capture import CaptureWarning, capture, recordings
from capture.engines.cuda.capture_graph import RefusedError
from capture.engines.cuda.recorder import GraphRecorder
from tests.distributed.test_ddp import replicated, sharded, train, training
from tests.distributed.test_rank_agreement import ONE_FALLS_OUT, played, reads_between_collectives
from tests.support.collectives import collectives
from tests.support.ranks import two_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_collectives(tmp_path: Path) -> None:
    two_ranks(collectives, tmp_path, device="cuda", seconds=120)


def test_training(tmp_path: Path) -> None:
    two_ranks(training, tmp_path, device="cuda", seconds=120)


def _made_on_a_side_stream(rank: int) -> list[Any]:
    """Make a ``DistributedDataParallel`` on a side stream: it keeps its parameters' nodes, which belong to that
    stream."""

    def wrap(layers: Any) -> Any:
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            made = replicated(gradient_as_bucket_view=True)(layers)
        here.wait_stream(side)
        return made

    expected, _, _ = train(rank, wrap, "nothing")
    values, texts, counts = train(rank, wrap, "step")
    assert [value.tolist() for value in values] == [value.tolist() for value in expected], counts
    assert texts == [], texts
    return counts


def test_ddp_made_on_a_side_stream(tmp_path: Path) -> None:
    """A step of such a wrapper is recorded with every supported version of torch."""
    for (counts,) in two_ranks(_made_on_a_side_stream, tmp_path, device="cuda", seconds=120):
        assert counts.replays >= 4, counts
        assert counts.eager_calls == 0, counts


def test_a_rank_that_falls_out(tmp_path: Path) -> None:
    """A rank whose body raises, that is stopped in its recording, or that gives up, lets no other rank hang."""
    two_ranks(functools.partial(played, scenes=ONE_FALLS_OUT), tmp_path, device="cuda", seconds=120)


def test_a_host_read_between_collectives(tmp_path: Path) -> None:
    """A body that reads a value between collectives is not cut there, as no rank alone could undo a collective: it is
    eager, with a finding."""
    reads = functools.partial(played, scenes=(reads_between_collectives,))
    two_ranks(reads, tmp_path, device="cuda", seconds=120)


def _scheduled(rank: int) -> list[Any]:
    """Collectives beside independent work, in the order that the data needs."""

    def body(x: Tensor) -> Tensor:
        parts = [torch.tanh(x + number) for number in range(4)]
        dist.all_reduce(parts[0])
        parts += [torch.sin(x * number) @ x for number in range(4)]
        dist.all_reduce(parts[-1])
        gathered = x.new_empty(2 * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, parts[1] + parts[-1])
        return torch.stack(parts).sum(0) + gathered.view(2, *x.shape).sum(0)

    step = capture(body, schedule="auto")
    with torch.no_grad():
        for number in range(120):
            x = torch.randn(
                64, 64, generator=torch.Generator("cpu").manual_seed(2 * number + rank), device="cpu"
            ).cuda()
            assert torch.equal(step(x), body(x)), number
    return [recordings(step).recordings, recordings(step).replays]


def test_an_order_by_data(tmp_path: Path) -> None:
    """Once the order by data was timed kernels may run in it; collectives act as barriers and stay in their place."""
    for counts in two_ranks(_scheduled, tmp_path, device="cuda", seconds=120):
        assert counts[1] > 60, counts


def _in_growing_segments(rank: int) -> list[Any]:
    step = capture(lambda x: _summed(x * 2) + 1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for number in range(8):
            x = torch.full((1 << 20,), float(number + rank))
            assert torch.equal(step(x), torch.full((1 << 20,), float(4 * number + 3)))
            del x
    return [recordings(step).replays, [finding.code for finding in recordings(step).findings]]


def _summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("registers", [False, True])
def test_expandable_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registers: bool) -> None:
    """NCCL registers buffers of captured collectives, which it cannot with expandable segments: replays would hang."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if registers:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    else:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    for replays, codes in two_ranks(_in_growing_segments, tmp_path, device="cuda", seconds=120):
        assert (replays == 0, "CG704" in codes) == (registers, registers), (replays, codes)


def _stops_half_way(rank: int) -> list[Any]:
    """Stop recordings of a sharded step in the forward or the backward pass, while parameters are gathered and
    callbacks at the end of the backward pass are queued or not."""
    launch, codes = GraphRecorder._launch, []
    expected, _, _ = train(rank, sharded, "nothing")
    for stop in (5, 30, 60, 90):

        def give_up(recorder: Any, *args: Any, stop: int = stop) -> Any:
            if len(recorder.trace.sequence) == stop:
                raise RefusedError("this test ends it")
            return launch(recorder, *args)

        GraphRecorder._launch = give_up  # type: ignore[method-assign, assignment]
        values, texts, counts = train(rank, sharded, "step")
        assert [value.tolist() for value in values] == [value.tolist() for value in expected], (stop, counts)
        assert counts[0].recordings == 0
        codes.append([text[:5] for text in texts])
    return codes


def test_recordings_that_stop_half_way(tmp_path: Path) -> None:
    found = two_ranks(_stops_half_way, tmp_path, device="cuda", seconds=120)
    assert all(set(codes) <= {"CG904", "CG701"} and codes for rank in found for codes in rank), found
