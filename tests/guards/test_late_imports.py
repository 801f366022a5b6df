"""Modules that a body imports itself: what it reads there is guarded, and nothing else they lead to is searched."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.device import DEVICE
from tests.support.regions import bits


@pytest.fixture
def late() -> Iterator[Any]:
    """A package with a module of settings, which also knows a large one."""
    package: Any = types.ModuleType("late_package")
    package.settings, package.large = types.ModuleType("late_package.settings"), types.ModuleType("large")
    package.settings.scale, package.shift = 2.0, 1.0
    package.large.settings = [[number] for number in range(60_000)]
    sys.modules |= {"late_package": package, "late_package.settings": package.settings}
    yield package
    del sys.modules["late_package"], sys.modules["late_package.settings"]


def by_package(x: Tensor) -> Any:
    import late_package  # type: ignore[import-not-found]

    if x.dim() > 9:
        return late_package.large
    return x * late_package.settings.scale + late_package.shift


def by_name(x: Any) -> Any:
    from late_package.settings import scale  # type: ignore[import-not-found]

    if x.dim() > 9:
        return x.large
    return x * scale


@pytest.mark.parametrize("body", [by_package, by_name])
def test_what_is_read_there(late: Any, body: Any) -> None:
    f = capture(body)
    x = torch.randn(2, 3, device=DEVICE)
    for number in range(12):
        if number == 6:
            late.settings.scale = 3.0
        assert bits(f(x)) == bits(body(x))
    assert recordings(f).replays >= 6
