"""The trial of two orders of kernels: each timed call is one replay, the faster order stays, and no call waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, field

from capture.engines.cuda.schedule_choice import EACH, ROUNDS, Order, ScheduleChoice

WHOLE = len(ROUNDS) * (EACH + 1)


@define(slots=False)
class Device:
    """A clock that replays move by their order's time, and whether the device is behind the host."""

    now: float = 0.0
    is_behind: bool = False


@define(slots=False)
class Mark:
    device: Device
    at: float = 0.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return not self.device.is_behind

    def elapsed_time(self, end: Mark) -> float:
        return end.at - self.at


@define(slots=False)
class Recording:
    device: Device
    times: dict[str, float]
    can: bool = True
    order: Order = "recorded"
    ran: list[Order] = field(factory=list)
    decided: list[tuple[Order, tuple[float, float] | None]] = field(factory=list)

    def plan_schedule(self) -> bool:
        return self.can

    def run_by(self, order: Order) -> None:
        self.order = order

    def step(self, leaves: Sequence[Any]) -> None:
        self.ran.append(self.order)
        self.device.now += self.times[self.order]

    def decide(self, order: Order, times: tuple[float, float] | None) -> None:
        self.decided.append((order, times))


def trial(recorded: float, by_data: float, **more: Any) -> tuple[Recording, ScheduleChoice]:
    device = Device()
    recording = Recording(device, {"recorded": recorded, "by data": by_data}, **more)
    return recording, ScheduleChoice(recording, 3, lambda: Mark(device))


@pytest.mark.parametrize(
    ("by_data", "chosen"), [(0.5, "by data"), (0.97, "by data"), (0.99, "recorded"), (2.0, "recorded")]
)  # fmt: skip
def test_the_faster_order_stays(by_data: float, chosen: Order) -> None:
    recording, choice = trial(1.0, by_data)
    for number in range(3 + WHOLE):
        choice([])
        assert len(recording.ran) == number + 1  # one call, one replay
    assert recording.decided == []
    choice([])
    ((order, times),) = recording.decided
    assert (order, recording.order, recording.ran[-1]) == (chosen, chosen, chosen)
    assert times == pytest.approx((1.0, by_data))
    assert set(recording.ran[: 3 + EACH + 1]) == {"recorded"}
    assert recording.ran.count("by data") >= 2 * (EACH + 1)
    choice([])
    assert len(recording.decided) == 1


def test_without_another_order_nothing_is_tried() -> None:
    recording, choice = trial(1.0, 0.1, can=False)
    for _ in range(10):
        choice([])
    assert recording.decided == [("recorded", None)]
    assert set(recording.ran) == {"recorded"}


def test_nobody_waits_for_the_device() -> None:
    """A host that is ahead replays on in the same order, and those replays are not counted."""
    recording, choice = trial(1.0, 0.5)
    recording.device.is_behind = True
    for _ in range(3 + WHOLE):
        choice([])
    assert set(recording.ran) == {"recorded"}
    recording.device.is_behind = False
    for _ in range(WHOLE):
        choice([])
    assert recording.decided == [("by data", (1.0, 0.5))]


@pytest.mark.parametrize("calls", [0, 3, 5, 12, 20])
def test_it_ends_as_recorded_when_it_is_stopped(calls: int) -> None:
    recording, choice = trial(1.0, 0.5)
    for _ in range(calls):
        choice([])
    choice.end()
    assert (recording.order, recording.decided) == ("recorded", [("recorded", None)])
    choice([])
    assert recording.ran[-1] == "recorded"


def test_a_driver_that_refuses_ends_it() -> None:
    recording, choice = trial(1.0, 0.5)

    def refuse(order: Order) -> None:
        choice.is_over = True
        recording.decide("recorded", None)

    recording.run_by = refuse  # type: ignore[method-assign]
    for _ in range(3 + WHOLE):
        choice([])
    assert recording.decided == [("recorded", None)]
    assert set(recording.ran) == {"recorded"}
