"""Modules that a body imports itself: what it reads there is guarded, and nothing else they lead to is searched."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, recordings
from capture.guards import read_walk
from capture.key.code_names import module_lookups
from capture.key.packages import is_installed, users_modules
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


STEP = 0
"""A script's count of its steps is a global of its module."""


NAME = ["sc", "ale"]


class Options:
    """Code that looks up names which are worked out may read all that it reaches."""

    scale = 2.0


def asks_what_is_there(x: Tensor) -> Tensor:
    """As code does that serves several frameworks."""
    scale: float = getattr(Options, "".join(NAME))
    return x * scale + (1 if "a_framework" in sys.modules else 0) - (1 if "another_one" not in sys.modules else 0)


class Parts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for part in self.modules():
            if isinstance(part, torch.nn.Linear):
                x = getattr(part, "for" + "ward")(x)
        return x


@pytest.mark.parametrize("body", [asks_what_is_there, Parts().to(DEVICE)])
def test_who_asks_which_modules_are_there_reads_none(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The globals of users' modules are no part of it, as they are where a module is got by a computed name."""
    f = capture(body)
    x = torch.randn(2, 3, device=DEVICE)
    for number in range(36):
        monkeypatch.setitem(globals(), "STEP", number)
        if number == 12:
            monkeypatch.setitem(sys.modules, "a_framework", types.ModuleType("a_framework"))
        if number == 24:
            monkeypatch.setattr(Options, "scale", 3.0)
        assert bits(f(x)) == bits(body(x)), number
    assert recordings(f).replays >= 24


GETS = (
    "sys.modules['a']", "sys.modules.get(x)", "importlib.import_module(a)", "sys.modules", "__import__(a)",
    "[one for one in sys.modules]", "getattr(sys, 'modules')[a]", "list(sys.modules.values())",
)  # fmt: skip
ASKS = "'a' in sys.modules", "a not in sys.modules"
NEITHER = "model.modules()", "model.parts[a]", "list(model.modules())", "a in sys.path"
BOTH = ("a in sys.modules and sys.modules[a]",)


@pytest.mark.parametrize(
    ("text", "found"),
    [*zip(GETS, repeat({"gets"})), *zip(ASKS, repeat({"asks"})), *zip(NEITHER, repeat(set[str]())),
     *zip(BOTH, repeat({"asks", "gets"}))],
)  # fmt: skip
def test_what_is_done_with_modules(text: str, found: set[str]) -> None:
    code = compile(f"lambda a, x, model: {text}", "", "eval").co_consts[0]
    nested = [code, *[one for one in code.co_consts if isinstance(one, types.CodeType)]]
    assert set().union(*map(module_lookups, nested)) == found


def test_installed_packages_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Namespace packages have folders alone."""
    installed, own, made = (types.ModuleType(f"a_package_{number}") for number in range(3))
    vars(installed)["__path__"] = [str(tmp_path / "site-packages" / "a_package_0")]
    vars(own)["__path__"] = [str(tmp_path / "a_package_1")]
    for module in (installed, own, made):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert [is_installed(module) for module in (installed, own, made, torch, sys)] == [True, False, False, True, False]
    assert users_modules() & {"a_package_0", "a_package_1", "a_package_2"} == {"a_package_1", "a_package_2"}
