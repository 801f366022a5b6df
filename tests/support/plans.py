"""A cache of plans for one test, and what the log says of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import capture
from capture.api.decorator import captured_states
from capture.core import config
from capture.core.plan import CapturePlan
from capture.plan_cache import store
from capture.runtime.captured import Captured

Body = Callable[..., torch.Tensor]
_alive: list[Body] = []  # kept alive, as plans go with their function


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> Iterator[Path]:
    """The folder of plans of one test."""
    path = tmp_path / "plans"
    with config.patch(cache=True, cache_dir=path), torch.no_grad():
        yield path
    store.forget_loaded()
    _alive.clear()


def plain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).relu() - x


def described(x: torch.Tensor, other: object) -> torch.Tensor:
    return (x + 1) * 2 - x


def run(body: Body, *arguments: Any, num_calls: int = 3, **options: Any) -> Captured:
    """Capture the body anew, as a new process would, and call it a few times; each result has to be right."""
    function = capture(body, **options)
    _alive.append(function)
    for count in range(num_calls):
        x = torch.arange(6.0).view(2, 3) - count
        assert torch.equal(function(x, *arguments), body(x, *arguments))
    (state,) = captured_states(function)
    return state


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def only_file(directory: Path) -> Path:
    (path,) = files(directory)
    return path


def plan_of(state: Captured) -> CapturePlan:
    plan = state.entries()[0].plan
    assert plan is not None
    return plan


def details(state: Captured, kind: str) -> list[str]:
    return [event.detail for event in state.log.events if event.kind == kind]


def assert_loaded(state: Captured) -> None:
    assert (state.log.counters.observations, state.log.counters.plans_loaded) == (0, 1)
    assert len(details(state, "plan-loaded")) == 1
    assert details(state, "plan-stale") == []


def assert_stale(state: Captured, word: str) -> None:
    """Check that the stale plan was named and the body watched again; ``run`` has compared the results."""
    (reason,) = details(state, "plan-stale")
    assert word in reason
    assert (state.log.counters.observations, state.log.counters.plans_loaded) == (1, 0)
    assert state.log.counters.plans_stale == 1


def module_with(tmp_path: Path, folder: str, text: str) -> Any:
    path = tmp_path / folder / "users_module.py"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("users_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
