"""A recording turns from one order of its kernels to the other, and back where anything stands in the way."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typing_extensions import override

from capture.engines.base import Move
from capture.engines.cuda.graph_edges import GraphEdge
from capture.engines.cuda.kernel_params import DriverError
from capture.engines.cuda.replay import CudaRecording
from capture.engines.cuda.schedule_choice import Order, ScheduleChoice
from capture.engines.cuda.scheduling import GraphSchedule
from capture.schedule.dependencies import Dependencies

FOUND = Dependencies(((0, 2), (1, 2)), (0, 0, 1))


class Driver:
    """A graph, what was instantiated of it, and what may be."""

    def __init__(self) -> None:
        self.edges: Order = "recorded"
        self.instantiated: Order = "recorded"
        self.refuses: tuple[Order, ...] = ()
        self.stops = False
        self.ran: list[Order] = []

    def instantiate(self) -> None:
        if self.stops:
            self.stops = False
            raise KeyboardInterrupt
        self.instantiated = self.edges


class Schedule(GraphSchedule):
    driver: Driver

    @override
    def give_edges(self, order: Order) -> None:
        self.driver.edges = order
        if order in self.driver.refuses:
            raise DriverError("refused")


class Copies:
    device_copies: Sequence[Any] = ()


class Pool:
    device = torch.device("cpu")
    index = 0


class Recording(CudaRecording):
    """A recording that launches nothing but this driver's graph."""

    def __init__(self, driver: Driver) -> None:
        pool: Any = Pool()
        super().__init__(pool, driver, Copies(), [], [], draws=False, kept=frozenset())  # type: ignore[arg-type]
        self.driver = driver
        self._schedule = made = Schedule(1, (), (GraphEdge(1, 2),), (), FOUND, ("a", "b"))
        object.__setattr__(made, "driver", driver)
        self._reported = made.report("undecided", None)
        self._choice = ScheduleChoice(self, 0, lambda: None)  # type: ignore[arg-type, return-value]
        self._choice._round = 0
        self._replay_by(self._make_replay())

    @override
    def _make_replay(self) -> Any:
        order = self.driver.instantiated

        def launch(leaves: Sequence[Any]) -> None:
            assert order == self.driver.instantiated, "launches what was destroyed"
            self.driver.ran.append(order)

        return launch


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return Recording(Driver())


def test_the_choice_stays(recording: Recording) -> None:
    recording.run_by("by data")
    recording.decide("by data", (1.0, 0.5))
    recording.replay([])
    assert recording.driver.ran == ["by data"]
    assert recording.order == "by data: longest path 2 of 3 kernels, at most 2 at once, 0.500 ms instead of 1.000"


@pytest.mark.parametrize("chosen", [True, False])
def test_a_tensor_that_moves_brings_the_recorded_order_back(recording: Recording, chosen: bool) -> None:
    recording.run_by("by data")
    if chosen:
        recording.decide("by data", (1.0, 0.5))
    tensor = torch.ones(3, device="cpu")
    assert recording.rebind([Move("w", tensor.data_ptr() + 256, tensor, tensor)]) is False  # it has to learn first
    assert recording.driver.instantiated == "recorded"
    recording.replay([])
    assert recording.driver.ran == ["recorded"]
    assert recording.order.startswith("recorded: its tensors are elsewhere than when it was recorded")


def test_a_tensor_at_the_same_address_changes_nothing(recording: Recording) -> None:
    recording.run_by("by data")
    recording.decide("by data", (1.0, 0.5))
    tensor = torch.ones(3, device="cpu")
    assert recording.rebind([Move("w", tensor.data_ptr(), tensor, tensor)])
    assert recording.driver.instantiated == "by data"


def test_edges_that_the_driver_refuses_are_left(recording: Recording) -> None:
    recording.driver.refuses = ("by data",)
    recording.run_by("by data")
    recording.replay([])
    assert (recording.driver.ran, recording.order) == (["recorded"], "recorded: refused")
    assert recording._choice is None


def test_no_replay_runs_where_the_way_back_is_refused(recording: Recording) -> None:
    recording.run_by("by data")
    recording.decide("by data", (1.0, 0.5))
    recording.driver.refuses = ("recorded",)
    tensor = torch.ones(3, device="cpu")
    with pytest.raises(DriverError, match="refused"):
        recording.rebind([Move("w", tensor.data_ptr() + 256, tensor, tensor)])


def test_an_interrupt_in_the_middle_leaves_nothing_destroyed(recording: Recording) -> None:
    recording.driver.stops = True
    with pytest.raises(KeyboardInterrupt):
        recording.run_by("by data")
    recording.replay([])
    recording.step([])
    assert recording.driver.ran == ["by data", "by data"]


def test_nothing_is_told_without_a_trial(recording: Recording) -> None:
    recording._reported = None
    assert (recording.order, recording.schedule()) == ("", None)
