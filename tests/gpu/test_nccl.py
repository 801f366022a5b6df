"""Two processes under NCCL, a GPU each: the programs that `tests/distributed` runs under gloo."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.engines.cuda.capture_graph import RefusedError
from capture.engines.cuda.recorder import GraphRecorder
from tests.distributed.test_ddp import replicated, sharded, train, training
from tests.distributed.test_rank_agreement import ONE_FALLS_OUT, played
from tests.support.collectives import collectives
from tests.support.ranks import two_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_collectives(tmp_path: Path) -> None:
    two_ranks(collectives, tmp_path, device="cuda", seconds=120)


def test_training(tmp_path: Path) -> None:
    two_ranks(training, tmp_path, device="cuda", seconds=120)


def _made_on_a_side_stream(rank: int) -> list[Any]:
    """``DistributedDataParallel`` keeps its parameters' nodes, which belong to the stream that it was made on."""

    def wrap(layers: Any) -> Any:
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            made = replicated(gradient_as_bucket_view=True)(layers)
        here.wait_stream(side)
        return made

    expected, _, _ = train(rank, wrap, "nothing")
    found, texts, counts = train(rank, wrap, "step")
    assert [one.tolist() for one in found] == [one.tolist() for one in expected], counts
    assert texts == [], texts
    return counts


def test_ddp_made_on_a_side_stream(tmp_path: Path) -> None:
    """It is recorded with every torch."""
    for (counts,) in two_ranks(_made_on_a_side_stream, tmp_path, device="cuda", seconds=120):
        assert counts.replays >= 4, counts
        assert counts.eager_calls == 0, counts


def test_a_rank_that_falls_out(tmp_path: Path) -> None:
    """As under gloo: a rank whose body raises or is stopped in its recording, or that gives up, hangs nobody."""
    two_ranks(functools.partial(played, scenes=ONE_FALLS_OUT), tmp_path, device="cuda", seconds=120)


def _stops_half_way(rank: int) -> list[Any]:
    """Recordings of a sharded step end early, in the forward pass or in the backward pass: parameters are gathered, and
    what the backward pass does at its end is due or not."""
    launch, codes = GraphRecorder._launch, []
    expected, _, _ = train(rank, sharded, "nothing")
    for stop in (5, 30, 60, 90):

        def give_up(recorder: Any, *args: Any, stop: int = stop) -> Any:
            if len(recorder.trace.sequence) == stop:
                raise RefusedError("this test ends it")
            return launch(recorder, *args)

        GraphRecorder._launch = give_up  # type: ignore[method-assign, assignment]
        found, texts, counts = train(rank, sharded, "step")
        assert [one.tolist() for one in found] == [one.tolist() for one in expected], (stop, counts)
        assert counts[0].recordings == 0
        codes.append([text[:5] for text in texts])
    return codes


def test_recordings_that_stop_half_way(tmp_path: Path) -> None:
    found = two_ranks(_stops_half_way, tmp_path, device="cuda", seconds=120)
    assert all(set(codes) <= {"CG904", "CG701"} and codes for rank in found for codes in rank), found
