"""Where a watch is a dispatch mode, torch computes some values in another way: each such body is told of (CG210)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from capture.torch_private import operator_watch
from tests.observe.test_operator_watch import OTHER_UNDER_A_MODE, gradient_of, other_under_a_mode
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
AS_UNDER_NONE: dict[str, Callable[[Tensor], Any]] = {
    "cumprod": lambda x: x.cumprod(1),
    "prod": lambda x: x.prod(1),
    "gradient of sum": gradient_of(lambda x: x.sum(1)),
    "gradient of cumsum": gradient_of(lambda x: x.cumsum(1)),
    "matmul": lambda x: x.reshape(2, 8, 16) @ x,
    "batches": lambda x: x.reshape(4, 8, 8) @ x.reshape(4, 8, 8),
}


def told(body: Callable[[Tensor], Any]) -> tuple[list[str], bool]:
    """Notes of CG210, and whether every call had eager's bits."""
    captured, equal = capture(body), True
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(16, 16, device=DEVICE)
        equal = torch.equal(captured(x.clone()), body(x.clone())) and equal
    return [str(finding) for finding in recordings(captured).findings if finding.code == "CG210"], equal


@pytest.fixture
def by_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch by a mode, as torch before 2.13 has to."""
    monkeypatch.setattr(operator_watch, "has_key", False)


@pytest.mark.usefixtures("by_mode")
@pytest.mark.parametrize("name", OTHER_UNDER_A_MODE)
def test_what_may_differ_is_told(name: str) -> None:
    notes, equal = told(other_under_a_mode(name))
    assert notes or (equal and name == "gradient of cumprod")  # which torch 2.13 computes to the same bits
    assert all("may differ from eager's" in note for note in notes)


@pytest.mark.usefixtures("by_mode")
@pytest.mark.parametrize("name", AS_UNDER_NONE)
def test_nothing_is_told_of_what_has_eagers_bits(name: str) -> None:
    assert told(AS_UNDER_NONE[name]) == ([], True)


@pytest.mark.skipif(not operator_watch.has_key, reason="here each watch is a mode")
@pytest.mark.parametrize("name", OTHER_UNDER_A_MODE)
def test_nothing_is_told_without_a_mode(name: str) -> None:
    assert told(other_under_a_mode(name)) == ([], True)


@pytest.mark.usefixtures("by_mode")
def test_the_line_is_told() -> None:
    def volume(x: Tensor) -> Any:
        y = x * 2
        return torch.linalg.svdvals(y).log().sum()

    (note,), _ = told(volume)
    assert "svdvals(y)" in note
    assert "test_altered_operators.py" in note
