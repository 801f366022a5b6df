"""State that is another tensor in each call: recordings with breaks copy what operators read, and what nothing reads
may lie anywhere, in the memory of recordings too."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from tests.gpu.moving import _axpy, triton
from tests.gpu.support import DEVICE, ON_CUDA, needs_gpu, rand, same
from tests.runtime.test_decisions import Step, Wrap, twins

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore::capture.CaptureWarning")]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Any:
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


def test_a_hidden_state_beside_a_read() -> None:
    def program(wrap: Wrap) -> Step:
        kept: dict[str, Tensor] = {"h": torch.zeros(16, device=DEVICE)}

        @wrap
        def f(x: Tensor) -> Tensor:
            kept["h"] = torch.tanh(kept["h"] * 0.5 + x)
            if kept["h"].sum() > 0:
                return kept["h"] * 2
            return kept["h"] - 1

        return lambda n: (f(rand(16, seed=n) + n % 2 - 0.5), kept["h"])

    assert twins(program) > 30


@pytest.mark.parametrize("reads", [False, True])
def test_a_window_that_nothing_reads(reads: bool) -> None:
    def program(wrap: Wrap) -> Step:
        window: deque[Any] = deque(maxlen=10)

        @wrap
        def f(x: Tensor) -> Tensor:
            y = x * 2
            window.append((x.sum(), y))
            if reads and bool(y.sum() > -1e9):
                y = y + 1
            return y

        return lambda n: (f(rand(16, seed=n)), list(window))

    assert twins(program) > 30


@pytest.mark.skipif(triton is None or not ON_CUDA, reason="a kernel of Triton")
def test_a_kernel_of_users_reads_what_moves() -> None:
    """No operator tells of it: the recording is not taken for one that leaves the tensor alone."""

    def run(wrap: Wrap) -> tuple[Any, list[Tensor]]:
        window: deque[Tensor] = deque([rand(16, seed=n) for n in range(4)], 4)

        @wrap
        def f(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            _axpy[(1,)](x, window[0], out, 16, 16)
            window.append(x * 2)
            return out

        return f, [f(rand(16, seed=n)).clone() for n in range(30)]

    _, expected = run(lambda target: target)
    captured, got = run(capture)
    for mine, theirs in zip(got, expected, strict=True):
        same(mine, theirs)
    assert recordings(captured).findings is not None
