"""A first call that takes long shows its progress on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, recordings, warmup
from capture.core import slow_calls
from tests.support.device import AGAIN


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    @override
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slow_calls, "AFTER", 0.02)
    yield
    assert slow_calls._current is None


def slow(x: Tensor) -> Tensor:
    x = x * 2
    time.sleep(0.03)
    return torch.relu(x + 1)


def said(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a few calls write to standard error."""
    captured = capture(slow, name="f")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        results = [captured(torch.ones(2)) for _ in range(5)]
    assert all(torch.equal(result, torch.full((2,), 3.0)) for result in results)
    counts = recordings(captured)
    told = counts, [(event.kind, event.detail) for event in counts.events]
    assert (counts.recordings, counts.findings) == (1 + AGAIN, ()), told
    return stderr.getvalue()


def test_it_is_told_while_it_goes_on_and_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = said(Terminal(), monkeypatch).split("\r")
    assert lines[0] == ""
    told = [line for line in lines if "watching" in line]  # a busy machine may be slow at another operator, too
    assert re.match(r"capture: watching the first call of f: \d\.\d s, [12] operators?", lines[1])
    assert re.match(r"capture: watching the first call of f: took \d\.", told[-1])
    assert told[-1].endswith(", 3 operators\n")
    assert re.match(r"capture: recording f: took \d\.", lines[-1])


def test_nothing_is_told_in_a_log_or_of_a_fast_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(io.StringIO(), monkeypatch) == ""
    monkeypatch.setattr(slow_calls, "AFTER", 60.0)
    assert said(Terminal(), monkeypatch) == ""


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(Gone(), monkeypatch) == ""


def test_a_warm_up_shows_its_bar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    captured = capture(slow, name="f")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        warmup(captured)(torch.ones(2))
    assert "warm-up of f" in stderr.getvalue()
    assert "1/1" in stderr.getvalue()
    assert "capture: " not in stderr.getvalue()
