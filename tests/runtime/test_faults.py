"""Whatever goes wrong inside the library: the call has eager's result and effects, once, and a finding tells of it."""

from __future__ import annotations

import logging
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from capture import CaptureWarning, UncapturableError, capture, config, recordings
from capture.engines.cpu.engine import CpuBackend
from tests.support.device import EXECUTES, rng_state


class Broken(Exception):
    """A fault of the library, which no body raises."""


class Counts(nn.Module):
    """Everything that a body may leave behind, and how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(3, 3)
        self.total: torch.Tensor
        self.register_buffer("total", torch.zeros(3))
        self.last: Any = None
        self.runs = 0

    @override
    def forward(self, x: torch.Tensor) -> Any:
        self.runs += 1
        y = self.lin(x) + torch.rand(3)
        self.total += y.detach()[0]
        x += 1
        self.last = y
        return y, {"double": y * 2}, x


class Steady(Counts):
    """The module without the counter of runs, which recordings do not keep up."""

    @override
    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x) + torch.rand(3)
        self.total += y.detach()[0]
        x += 1
        self.last = y
        return y, {"double": y * 2}, x


class Differentiable(Counts):
    """Its result needs gradients, so that its backward pass is recorded, too."""

    @override
    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.lin(x)) + torch.rand(3)
        self.total += y.detach()[0]
        self.last = y.detach()
        return y, {"double": y * 2}, x


def _told(module: Any, x: torch.Tensor) -> list[Any]:
    y, double, given = module(x)
    if y.requires_grad and isinstance(module, Differentiable):
        (y.sum() + double["double"].sum()).backward()
    state = [module.total.clone(), module.last.clone(), module.runs, rng_state().sum()]
    return [y.clone(), double["double"].clone(), given is x, x.clone(), *state, str(module.lin.weight.grad)]


def _same(results: list[Any], expected: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(results, expected, strict=True)
    )


def _fails_on(place: str, monkeypatch: pytest.MonkeyPatch, calls: range, *, after: bool) -> list[int]:
    """Have these calls of the function at ``place`` raise, before or after its work. Gives a list with the number of
    its calls."""
    module, _, path = f"capture.{place}".partition(":")
    owner_name, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(f"{module}:{owner_name}" if owner_name else module)
    original, count = getattr(owner, name), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        fails = count[0] in calls
        if fails and not after:
            raise Broken(name)
        result = original(*args, **kwargs)
        if fails:
            raise Broken(name)
        return result

    monkeypatch.setattr(owner, name, broken)
    return count


_PLACES = [
    "runtime.captured:key_of", "runtime.dispatch:tree_for", "runtime.matching:backend_for",
    "runtime.planning:describe", "runtime.planning:compile_plan", "runtime.planning:expected", "plan_cache.store:save",
    "state.snapshot:snapshot", "state.diff:changes", "observe.dispatch_mode:traits",
    "observe.dispatch_mode:tensors_out", "observe.dispatch_mode:tensors_in",
    "observe.dispatch_mode:ObserveMode._see_output", "observe.dispatch_mode:ObserveMode._see_writes",
    "observe.dispatch_mode:ObserveMode._see_draws",
    "runtime.record:inputs_for", "runtime.record:plan_recorded", "runtime.record:_node",
    "runtime.record:make_recording_guard", "runtime.record:compile_plan", "tree.tree:Tree.attach",
    "tree.tree:Tree.begin_call", "tree.tree:Tree.pattern", "tree.tree:Tree.before_recording",
]  # fmt: skip
_PLACES += [
    "engines.cpu.engine:describe", "engines.cpu.engine:TapeRecorder._move", "engines.cpu.engine:TapeRecorder._step",
    "engines.cpu.tape:Tape.compile",
] if EXECUTES else ["engines.cuda.engine:describe", "engines.cuda.engine:CudaBackend._recorded"]  # fmt: skip


@pytest.fixture(autouse=True)
def _forgiving() -> Iterator[None]:
    with config.patch(strict=False):
        yield


@pytest.mark.one_in(18)
@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"])
@pytest.mark.parametrize("with_gradients", [False, True], ids=["plain", "gradients"])
@pytest.mark.parametrize("place", _PLACES)
def test_a_fault_anywhere_costs_no_more_than_speed(
    place: str, with_gradients: bool, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (Counts, Steady, Differentiable) if after else (Differentiable,) if with_gradients else (Steady,)
    for kind in kinds:
        for first in (1, 2):
            eager, captured = kind(), capture(kind())
            with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                _fails_on(place, patched, range(first, first + 3), after=after)
                ours, expected = list[Any](), list[Any]()
                for results, module in ((expected, eager), (ours, captured)):
                    torch.manual_seed(1)
                    for number in range(6):
                        with torch.set_grad_enabled(with_gradients):
                            results.append(_told(module, torch.full((2, 3), float(number))))
            assert all(map(_same, ours, expected))
            texts = [str(warning.message) for warning in said if "CG905" in str(warning.message)]
            assert len(texts) == len(set(texts))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("place", ["planning:describe", "planning:expected", "planning:compile_plan"])
def test_a_watched_run_stands_where_recording_runs_execute_nothing(
    place: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's recording run is undone after a fault, and the body runs. A watched run did all that the body does."""
    monkeypatch.setattr(CpuBackend, "executes_recording_runs", False)
    eager, captured = Differentiable(), capture(Differentiable())
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fails_on(f"runtime.{place}", patched, range(first, 100), after=False)
        for number in range(3):
            results = list[Any]()
            for module in (eager, captured):
                torch.manual_seed(number)
                results.append(_told(module, torch.full((2, 3), float(number))))
            assert _same(*results)


def _breaking(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = capture(Steady())
    _fails_on("runtime.planning:describe", monkeypatch, range(1, 100), after=False)
    return module


def test_a_fault_is_told_once_with_its_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = _breaking(monkeypatch)
    with caplog.at_level(logging.WARNING, "capture"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CaptureWarning)
        for _ in range(6):
            _told(module, torch.ones(2, 3))
    assert len(said) == 1
    assert "Broken inside this library, at runtime/planning.py" in str(said[0].message)
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert [finding.code for finding in recordings(module).findings].count("CG905") == 1


def test_calls_that_go_wrong_again_and_again_are_not_looked_at_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _breaking(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(9):
            _told(module, torch.ones(2, 3))
    assert recordings(module).observations == 3


def test_what_options_ask_for_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    _fails_on("runtime.planning:describe", monkeypatch, range(1, 2), after=False)
    function = capture(lambda x: x + 1, name="asks", fallback="error")
    with pytest.raises(UncapturableError, match="CG905"):
        function(torch.ones(2))


def test_tests_see_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _breaking(monkeypatch)
    with config.patch(strict=True), pytest.raises(Broken):
        module(torch.ones(2, 3))


def test_the_error_of_a_body_comes_out_as_it_is_though_something_goes_wrong_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, error = [0], ValueError("the body's own")

    def body(x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] > 2:
            raise error
        return x * 2

    function = capture(body)
    for _ in range(2):
        function(torch.ones(2))
    _fails_on("runtime.record_failure:without_facts", monkeypatch, range(1, 100), after=False)
    _fails_on("observe.run:run_watched", monkeypatch, range(1, 100), after=True)
    for shape in (3, 4):
        with pytest.raises(ValueError, match="the body's own") as raised:
            function(torch.ones(shape))
        assert raised.value is error
        assert raised.value.__context__ is None
    assert runs[0] == 4
