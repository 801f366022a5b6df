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
from capture.guards import read_walk
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


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An installed package that leads to more than guards can be made of, and a module of the user's."""
    # the modules of all other tests are the user's, too, and hold large tables
    monkeypatch.setattr(read_walk, "users_modules", lambda: {"own_settings"})
    package: Any = types.ModuleType("large_package")
    package.__file__ = "/usr/lib/site-packages/large_package.py"
    package.settings = [[number] for number in range(60_000)]
    settings: Any = types.ModuleType("own_settings")
    settings.scale = 2.0
    sys.modules |= {"large_package": package, "own_settings": settings}
    yield settings
    for name in ("large_package", "own_settings", "comes_later"):
        sys.modules.pop(name, None)


def looked_for(x: Tensor, reduction: str = "sum", later: str = "comes_") -> Any:
    total = getattr(x, reduction)(dim=0)  # with this any name may be looked up
    settings = sys.modules["own_" + "settings"]
    if later + "later" in sys.modules:
        return total
    return total * getattr(settings, "sca" + "le")


def test_names_and_modules_that_are_worked_out(loaded: Any) -> None:
    """The search for what a body reads does not go through all that was ever imported."""
    f = capture(looked_for)
    x = torch.randn(2, 3, device=DEVICE)
    for number in range(36):
        if number == 12:
            loaded.scale = 3.0
        if number == 24:
            sys.modules["comes_later"] = types.ModuleType("comes_later")
        assert bits(f(x)) == bits(looked_for(x))
    assert recordings(f).replays >= 18
