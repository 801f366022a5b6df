"""The device of the suite, and names of parametrised cases that are the same in every process, as xdist needs them.

``CAPTURE_TEST_DEVICE=cuda`` runs every test that names no device on the GPU (``make test-gpu``).
"""

from __future__ import annotations

import re

import pytest

from capture import _step
from tests.device import use_device

use_device()


@pytest.fixture(autouse=True)
def _unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end by themselves until a test marks them."""
    monkeypatch.setattr(_step.marks(), "begun", 0)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Names without addresses; None where pytest's own name has none."""
    text = repr(val)
    if " at 0x" not in text:
        return None
    name = getattr(val, "__qualname__", None)
    return name if isinstance(name, str) else re.sub(r" (of type object )?at 0x[0-9a-f]+", "", text)
