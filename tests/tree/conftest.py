"""Outputs of the tests here are small, and lie in the pool all the same: the CPU engine stands for a device's."""

from __future__ import annotations

import pytest

from capture.runtime import record


@pytest.fixture(autouse=True)
def in_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have outputs in the pool: none gets memory of its own before it was kept."""
    monkeypatch.setattr(record, "MOST_OWNED", 0)
