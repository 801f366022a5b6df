"""Verification, logs and the report."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from capture import CaptureWarning, capture, config, recordings, report
from capture.core.events import parse_logs
from capture.core.options import Verify
from capture.runtime import verify as _verify
from tests.support.device import DEVICE
from tests.support.unguarded import set_unguarded, unguarded


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    set_unguarded(2)
    with torch.no_grad(), config.patch(cache=False):
        yield


def deep(x: Tensor) -> Tensor:
    """Reads what no guard covers."""
    return x * unguarded()


def test_a_difference_is_named_and_eager_wins() -> None:
    @capture(verify="always")
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, deep(x) + 1

    x = torch.arange(4.0)
    for _ in range(3):
        f(x)
    set_unguarded(3)
    with pytest.warns(CaptureWarning, match=r"CG903.*'output\.1'"):
        first, second = f(x)
    assert torch.equal(first, x + 1)
    assert torch.equal(second, x * 3 + 1)
    assert torch.equal(f(x)[1], x * 3 + 1)
    assert recordings(f).eager_calls == 1


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the host reads a device's memory by a copy, which ends a segment")
def test_a_difference_within_a_large_array() -> None:
    """Of which the text shows the ends alone."""

    @capture(verify="always")
    def f(x: Tensor) -> Any:
        x = torch.cat([x, x[:1] * unguarded(), x])
        return (x + 1).numpy()

    x = torch.arange(4000.0)
    for _ in range(4):
        f(x)
    assert recordings(f).replays
    set_unguarded(3)
    x = x + 1
    with pytest.warns(CaptureWarning, match=r"CG903"):
        assert f(x)[4000] == 4.0


def test_first_verifies_one_replay_and_always_each() -> None:
    def body(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2

    first, always = capture(body, verify="first"), capture(body, verify="always")
    for seed in range(6):
        x = torch.full((3,), float(seed))
        assert torch.equal(first(x), body(x))
        assert torch.equal(always(x), body(x))
    assert recordings(first).verifications == 1
    assert recordings(always).verifications == recordings(always).replays == 4


def test_effects_and_draws_happen_once() -> None:
    total = torch.zeros(3)

    @capture(verify="always")
    def f(x: Tensor) -> Tensor:
        total.add_(x)
        return total * torch.rand(3)

    expected = torch.zeros(3)
    torch.manual_seed(0)
    wanted = []
    for seed in range(6):
        expected += seed
        wanted.append(expected * torch.rand(3))
    torch.manual_seed(0)
    for seed in range(6):
        assert torch.equal(f(torch.full((3,), float(seed))), wanted[seed])
    assert torch.equal(total, expected)


def test_what_differs_from_itself_is_a_note_and_stays_recorded() -> None:
    """A custom operator that counts its own calls: eager differs from eager."""
    calls = [0]

    @torch.library.custom_op("capture_tests::counting", mutates_args=())
    def counting(x: Tensor) -> Tensor:
        calls[0] += 1
        return x + calls[0]

    @capture(verify="always")
    def f(x: Tensor) -> Tensor:
        counted: Tensor = counting(x)
        return counted * 1

    for _ in range(5):
        f(torch.ones(2, device="cpu"))  # a graph would run the operator as an island
    by_code = {finding.code: finding for finding in recordings(f).findings}
    assert str(by_code["CG903"].severity) == "note"
    assert "run to run" in by_code["CG903"].what
    assert recordings(f).eager_calls == 0


def test_environment_asks_for_verification_of_all() -> None:
    f = capture(lambda x: torch.tanh(x) + 1)
    with config.patch(verify="first"):
        for _ in range(5):
            f(torch.ones(2))
    assert recordings(f).verifications == 1


def test_logs_follow_the_grammar_of_torch_logs() -> None:
    levels = parse_logs("recordings,+skips,-plans")
    assert levels["record"] == logging.INFO
    assert levels["fallback"] == logging.DEBUG
    assert "plan" not in levels
    assert "plan" not in parse_logs("all,-plans")
    with pytest.raises(ValueError, match=r"unknown word 'recording'.*recordings"):
        parse_logs("recording")


def test_the_report_lists_functions_and_reasons() -> None:
    @capture
    def syncs(x: Tensor) -> float:
        return float(np.from_dlpack(x.sum().cpu()))

    with pytest.warns(CaptureWarning, match="CG201"):
        syncs(torch.ones(2))
    line = next(line for line in report().splitlines() if "syncs" in line and "CG" not in line)
    assert line.split()[1:4] == ["1", "0", "%"]
    assert any(line.startswith("  CG201 host-sync") for line in report().splitlines())


def test_events_are_timed() -> None:
    f = capture(lambda x: torch.tanh(x) + 1)
    for _ in range(3):
        f(torch.ones(2))
    kinds = [event.kind for event in recordings(f).events]
    assert kinds.index("observe") < kinds.index("record")
    assert all(event.ms > 0 for event in recordings(f).events if event.kind in ("observe", "record"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("fails", [1, 2, 3, 4, 5])
def test_without_memory_to_compare_the_call_happens_once(
    monkeypatch: pytest.MonkeyPatch, verify: Verify, fails: int
) -> None:
    """Copies of the state are taken up to four times in one verification."""
    total, taken = torch.zeros(3), list[int]()
    whole = _verify._state

    def short(*given: Any) -> Any:
        taken.append(1)
        if len(taken) == fails:
            raise torch.OutOfMemoryError("no memory")
        return whole(*given)

    @capture(verify=verify)
    def f(x: Tensor) -> Tensor:
        total.add_(deep(x))
        return total * 2

    monkeypatch.setattr(_verify, "_state", short)
    wanted = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # the fourth call's replay differs
        for turn in range(6):
            if turn == 3:
                set_unguarded(3)
            x = torch.full((3,), float(turn))
            wanted += deep(x)
            if verify == "always" or turn < 3:
                assert torch.equal(f(x), wanted * 2)
                assert torch.equal(total, wanted)
    assert len(taken) >= min(fails, 3)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool, torch.int64])
@pytest.mark.parametrize("of", [(1, 1), (1, 4), (4, 1)])
def test_one_number_of_any_stride_is_compared(of: tuple[int, int], dtype: torch.dtype) -> None:
    """A tensor of one number counts as contiguous, so that ``contiguous()`` returns it unchanged."""

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        made = (x + x).as_strided((1,), (of[1] * 3,))
        return made, torch.empty_strided((1, 1), (7, 5), dtype=dtype).copy_(made)

    f = capture(body, verify="always")
    for seed in range(5):
        x = torch.full(of, seed + 1).to(dtype)
        for ours, theirs in zip(f(x), body(x), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
        del ours
    assert recordings(f).verifications == 3
