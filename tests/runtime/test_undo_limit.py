"""How much may be copied before each replay, so that a call can be undone where the host reads a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, config, recordings
from capture.engines import undo
from tests.support.decorated import bits
from tests.support.decorated import fresh as fresh

KIB = 1 << 10


def written_before_a_read(memory: Tensor) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        memory.add_(x)
        if memory.sum() > -1:
            return memory * 2
        return x

    return body


def replays(size: int) -> int:
    """How many of eight calls of a body that writes so many bytes are replays. Each has to give eager's bits."""
    ours, eager = torch.zeros(size // 4), torch.zeros(size // 4)
    f, g = capture(written_before_a_read(ours)), written_before_a_read(eager)
    for number in range(8):
        x = torch.full((size // 4,), float(number))
        assert bits(f(x)) == bits(g(x))
        assert bits(ours) == bits(eager)
    return recordings(f).replays


def test_it_is_a_share_of_what_recordings_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.patch(memory_limit=0.5):
        assert undo.most_undo(1 << 36) == 1 << 32
        assert undo.most_undo(1 << 20) == undo.LEAST_UNDO == 1 << 28
    with config.patch(memory_limit=float(1 << 34)):
        assert undo.most_undo(1 << 40) == 1 << 31
    monkeypatch.setattr(undo, "LEAST_UNDO", 16 * KIB)
    monkeypatch.setattr(undo, "UNDO_SHARE", 512)
    with config.patch(memory_limit=float(128 * 512 * KIB)):  # the pool of a device is some MiB
        assert replays(64 * KIB) > 3
        with pytest.warns(CaptureWarning, match="would have to be kept"):
            assert replays(256 * KIB) == 0
    assert replays(256 * KIB) > 3


def test_copies_count_for_the_limit() -> None:
    """Recordings whose copies are too much together go at the end of the call that made another one."""
    with torch.device("cpu"):  # a device gives memory in pieces of 2 MiB
        _copies_count()


def _copies_count() -> None:
    functions, count = [], 12
    for _ in range(count):
        functions.append(capture(written_before_a_read(torch.zeros(16 * KIB))))
        for number in range(4):
            functions[-1](torch.full((16 * KIB,), float(number)))
    before = recordings(functions[0])
    assert [recordings(f).recordings - recordings(f).evictions for f in functions] == [1] * count
    limit = before.pool_bytes + before.graph_bytes + (count - 4) * 64 * KIB
    with config.patch(memory_limit=float(limit)):
        assert replays(64 * KIB) > 3
    assert sum(recordings(f).evictions for f in functions) >= 4
