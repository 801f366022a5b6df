"""A body that sets a setting of the process sets it in every call, also where it had that value already."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from capture import capture
from tests.support.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # such calls are eager, and told


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The settings are put back."""
    limit, interval, threshold, enabled = (
        sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()
    )  # fmt: skip
    yield
    sys.setrecursionlimit(limit)
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any, Any]] = {
    "collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable(), True, False),
    "thresholds": (gc.get_threshold, lambda of: gc.set_threshold(*of), (701, 11, 11), (702, 12, 12)),
    "recursion": (sys.getrecursionlimit, sys.setrecursionlimit, 3001, 3002),
    "switching": (sys.getswitchinterval, sys.setswitchinterval, 0.25, 0.125),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_set_in_every_call(name: str) -> None:
    get, put, of_body, of_others = SETTINGS[name]

    def body(x: torch.Tensor) -> torch.Tensor:
        put(of_body)
        return x * 2

    f = capture(body)
    for number in range(8):
        if number in (5, 7):
            put(of_others)
        x = torch.full((2,), 1.0 + number, device=DEVICE)
        assert f(x).tolist() == (x * 2).tolist()
        assert get() == of_body
