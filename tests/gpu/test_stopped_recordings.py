"""A recording that a signal stops, as requests with a time limit do, takes no other recording with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from capture.tree.thread_trees import forget_trees, trees_here
from tests.gpu.support import DEVICE, capturing, healthy, needs_cuda, needs_gpu, same
from tests.support.injection import Stopped, Stopping
from tests.support.unseen import Notes

pytestmark = [needs_gpu, needs_cuda, pytest.mark.filterwarnings("ignore")]
PLACES = 80


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget_trees()
    with torch.no_grad(), config.patch(cache=False, drop_slow=False):
        yield


def body(x: Tensor) -> Any:
    y = torch.relu(x * 2)
    if x.shape[0] > 4 and capturing() and stops.all():
        raise (SystemExit if "SystemExit" in stops.all() else KeyboardInterrupt)("stopped")
    return y + 1, y.sum()


stops = Notes()
"""What the body raises where it is recorded: no guard is to see it."""


def replayed(f: Callable[..., Any], x: Tensor) -> bool:
    """Whether a call is replayed. It has to be as eager's."""
    before = recordings(f).replays
    same(f(x), body(x))
    return recordings(f).replays > before


def ready(f: Callable[..., Any]) -> Tensor:
    """A small input that the function has a recording for."""
    small = torch.randn(4, 4, device=DEVICE)
    for _ in range(5):
        same(f(small), body(small))
    assert replayed(f, small)
    return small


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_stopped_in_the_body(error: type[BaseException], is_kept: bool) -> None:
    """Frames of the exception hold what the body made, for as long as somebody keeps it."""
    f = capture(body)
    small, large = ready(f), torch.randn(8, 4, device=DEVICE)
    f(large)
    kept = []
    for _ in range(4):
        stops.add(error.__name__)
        try:
            f(large)
        except error as stopped:
            kept += [stopped] * is_kept
        stops.clear()
        if not is_kept:
            assert replayed(f, small)
    for _ in range(4):
        same(f(large), body(large))
    assert replayed(f, large)
    if not is_kept:
        assert replayed(f, small)
    for _ in range(4):
        same(f(small), body(small))
    assert replayed(f, small)
    healthy()


@pytest.mark.parametrize("by_signal", [False, True], ids=["error", "signal"])
def test_stopped_anywhere(by_signal: bool) -> None:
    """Only a capture that was stopped while torch began or ended it costs the other recordings of its pool."""

    def stop(at: int) -> tuple[bool, Stopping]:
        f = capture(lambda x: body(x))
        small, large = ready(f), torch.randn(8, 4, device=DEVICE)
        for _ in range(2):
            same(f(large), body(large))
        stopping = Stopping(at, Stopped, lines=True, by_signal=by_signal, below=False)
        try:
            with stopping:
                f(large)
        except Stopped:
            pass
        is_left = replayed(f, small)
        for _ in range(4):
            same(f(large), body(large))
        assert replayed(f, large), stopping.where
        for _ in range(4):
            same(f(small), body(small))
        assert replayed(f, small), stopping.where
        return is_left, stopping

    stop(-1)
    count = stop(-1)[1].count
    lost = []
    for number in range(PLACES):
        is_left, stopping = stop(1 + number * count // PLACES)
        lost += [stopping.where] * (not is_left)
    reserved = [tree.pool.reserved_bytes() for tree in trees_here().values()]
    assert all(nbytes <= 64 << 20 for nbytes in reserved), reserved
    assert len(lost) <= PLACES // 20, lost
    healthy()
