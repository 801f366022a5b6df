"""An exception in the middle of a call leaves the collectives of the ranks in step.

A recording run that executes nothing is stopped. Other ranks wait in the collectives that it only captured, and would
take those of the next call for them: so the body runs before the exception comes out. A collective that has run does
not run again.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from typing_extensions import override

from capture import CaptureWarning, capture, config, recordings
from capture.engines.base import Recorded
from capture.engines.cpu.engine import CpuBackend
from capture.observe import run as run_module
from capture.runtime import training_region
from capture.state.call import Call
from tests.support.unseen import Notes


class Late(Exception):
    """Raised by a signal, as the timeout of a request is."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


PLACES = ["in the body", "behind the body", "behind the engine"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The place in a recording run where a signal comes, once; its handler raises. The run counts as captured alone."""
    # undoing a run leaves these notes, and ``request`` would lead a watched run to all of pytest
    notes, where = Notes(), request.param

    def ring(*_: object) -> None:
        raise Late("by a signal")

    def stopped(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if place == where and notes.all() == ["recording"]:
                notes.add("rung")
                signal.raise_signal(signal.SIGUSR1)
            return result

        return run

    record = CpuBackend.record

    def captured(*args: Any, **kwargs: Any) -> Recorded:
        notes.add("recording")
        return evolve(record(*args, **kwargs), executed=False)

    monkeypatch.setattr(CpuBackend, "executes_recording_runs", False)
    monkeypatch.setattr(Call, "run_plainly", stopped("in the body", Call.run_plainly))
    monkeypatch.setattr(run_module, "_compare", stopped("behind the body", run_module._compare))
    monkeypatch.setattr(CpuBackend, "record", stopped("behind the engine", captured))
    before = signal.signal(signal.SIGUSR1, ring)
    yield where
    signal.signal(signal.SIGUSR1, before)
    assert notes.all()[:2] == ["recording", "rung"]


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("communicates", [True, False])
@pytest.mark.usefixtures("group")
def test_the_body_runs_where_it_communicates(communicates: bool, place: str) -> None:
    @capture
    def step(x: Tensor) -> Tensor:
        y = x * 1.5
        if communicates:
            dist.all_reduce(y)
        return y + 1

    raised = list[str]()
    for _ in range(5):  # what a capture does not show is watched more than once
        try:
            step(torch.ones(3, device="cpu"))
        except Late as late:
            raised.append(str(late))
            break
    assert raised == ["by a signal"]
    counts = recordings(step)
    assert counts.recordings == 0
    # a signal in the body may be its own: all before it has to happen
    assert counts.eager_calls == (1 if communicates or place == "in the body" else 0)
    for _ in range(5):
        assert torch.equal(step(torch.ones(3, device="cpu")), torch.full((3,), 2.5, device="cpu"))
    assert recordings(step).replays > 0


class Summed(torch.autograd.Function):
    """Its backward pass communicates."""

    ran = Notes()

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Summed.ran.add("once")
        summed = grad * 2
        dist.all_reduce(summed)
        return summed


@pytest.mark.usefixtures("group")
def test_a_backward_pass_with_collectives_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the library behind the backward pass's collectives is raised: an eager run would repeat them."""
    summed: Any = Summed
    step = capture(lambda x: summed.apply(x).sin())

    def run(number: int) -> list[str]:
        Summed.ran.clear()
        step(torch.full((3,), float(number), device="cpu", requires_grad=True)).sum().backward()
        return Summed.ran.all()

    def fails(*args: Any) -> Any:
        raise ValueError("a fault of this library")

    with torch.enable_grad(), config.patch(strict=False), warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        assert run(0) == ["once"]
        with monkeypatch.context() as patch:
            patch.setattr(training_region, "_added", fails)
            with pytest.raises(ValueError, match="a fault of this library"):
                run(1)
            assert Summed.ran.all() == ["once"]
        assert run(2) == ["once"]
