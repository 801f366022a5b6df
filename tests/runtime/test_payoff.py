"""A recording whose replays take longer than its body is dropped."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from capture import capture, config, recordings
from capture.autograd.backward_timer import BackwardTimer
from capture.engines.cpu.engine import CpuBackend
from capture.runtime import eager_call, lives, payoff
from capture.runtime.payoff import AFTER, BODIES, ROUNDS, Payoff
from capture.torch_private import capabilities
from capture.tree import thread_trees
from tests.support.device import DEVICE, OWN_MEMORY
from tests.support.observed import bits

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
DECIDED = AFTER + BODIES + 8


class Clock:
    """A clock that advances by given times for each run of the body and each replay."""

    def __init__(self, body: float, replay: float) -> None:
        self.now, self.body, self.replay = 0.0, body, replay
        self.function: Any = None
        self._seen = 0, 0

    def __call__(self) -> float:
        counters = recordings(self.function)
        replays, bodies = self._seen
        self.now += (counters.replays - replays) * self.replay + (counters.measured_calls - bodies) * self.body
        self._seen = counters.replays, counters.measured_calls
        return self.now

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of all clocks. Calls go the general way, as fast paths read the clock in C."""
        monkeypatch.setattr(capabilities, "HAS_METADATA_GUARD", False)
        monkeypatch.setattr(payoff, "clock", self)
        monkeypatch.setattr(payoff, "own_time", self)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    lives.forget()
    with config.patch(cache=False, drop_slow=True), torch.no_grad():
        yield


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real clock decides after one round, however close it is."""
    monkeypatch.setattr(payoff, "ROUNDS", 1)


def body(x: Tensor) -> Tensor:
    """One that replays segment by segment."""
    y = torch.tanh(x) * 2
    return y + 1 if len(torch.nonzero(y > 0)) else y - 1


def measured(clock: Clock, monkeypatch: pytest.MonkeyPatch, calls: int) -> tuple[Any, list[Tensor]]:
    captured = clock.function = capture(body)
    clock.replace(monkeypatch)
    return captured, [captured(torch.ones(3) * (number + 1)) for number in range(calls)]


def test_a_recording_that_is_slower_than_its_body_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, results = measured(Clock(body=20e-6, replay=80e-6), monkeypatch, DECIDED)
    assert all(torch.equal(result, torch.tanh(torch.ones(3) * (at + 1)) * 2 + 1) for at, result in enumerate(results))
    (finding,) = [finding for finding in recordings(captured).findings if finding.code == "CG902"]
    assert "80 us, and the body 20 us" in finding.what
    assert recordings(captured).replays < DECIDED - BODIES
    assert not recordings(captured).sizes


@pytest.mark.parametrize("replay", [10e-6, 21e-6])
def test_one_that_is_not_stays(replay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, _ = measured(Clock(body=20e-6, replay=replay), monkeypatch, DECIDED)
    assert (recordings(captured).measured_calls, recordings(captured).eager_calls) == (BODIES, 0)
    assert recordings(captured).sizes


def test_single_calls_that_wait_decide_nothing() -> None:
    decision = Payoff()
    for number in range(AFTER + BODIES):
        if decision.wants_body:
            decision.note_body(1.0 if number % 4 == 0 else 20e-6)
        else:
            decision.note_replay(5.0 if number % 5 == 0 else 21e-6)
    assert len(decision.bodies) == BODIES
    assert decision.loss == 0.0


def after_rounds(replays: Sequence[float], bodies: Sequence[float]) -> Payoff:
    """The decision where replays, and runs of the body, take so many microseconds in each round."""
    decision = Payoff()
    while decision.is_open:
        if decision.wants_body:
            decision.note_body(bodies[decision.rounds] * 1e-6)
        else:
            decision.note_replay(replays[decision.rounds] * 1e-6)
    return decision


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("replays", "bodies", "rounds", "stays"),
    [
        ([20, 0, 0], [40, 0, 0], 1, True),
        ([80, 0, 0], [40, 0, 0], 1, False),
        ([45, 45, 45], [40, 40, 40], ROUNDS, False),
        ([50, 35, 50], [40, 60, 40], ROUNDS, True),
        ([50, 25, 0], [40, 40, 0], 2, True),
        ([38, 60, 38], [52, 30, 30], ROUNDS, False),
    ],
)
def test_what_is_close_is_measured_again(
    replays: Sequence[float], bodies: Sequence[float], rounds: int, *, stays: bool
) -> None:
    """The shortest times of all rounds decide: whatever else ran made the others longer."""
    decision = after_rounds(replays, bodies)
    assert (decision.rounds, decision.loss == 0.0) == (rounds, stays)
    assert len(decision.bodies) == rounds * BODIES


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the host waits for a device")
@pytest.mark.parametrize(("replay", "stays"), [(5e-6, True), (80e-6, False)])
def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch, replay: float, *, stays: bool) -> None:
    """Another program has the processor during replays, or during runs of the body."""
    captured = capture(body)
    own, wall = Clock(body=20e-6, replay=replay), Clock(body=20e-6, replay=1.0 if stays else 1e-6)
    own.function = wall.function = captured
    own.replace(monkeypatch)
    monkeypatch.setattr(payoff, "clock", wall)
    for number in range(DECIDED):
        captured(torch.ones(3) * (number + 1))
    assert bool(recordings(captured).sizes) is stays


def tiny(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1


def read(x: Tensor) -> Any:
    return torch.tanh(x) + 1, x.sum().item()


def branch(x: Tensor) -> Tensor:
    return torch.tanh(x) + 1 if x.sum() >= 0 else x


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
@pytest.mark.parametrize(("seconds", "stays"), [(1e-9, False), (1.0, True)])
@pytest.mark.parametrize("body", [tiny, read, branch])
def test_what_the_fast_path_replays_is_measured_too(
    monkeypatch: pytest.MonkeyPatch, body: Any, seconds: float, *, stays: bool
) -> None:
    """Replays are timed by the real clock; bodies are said to take ``seconds``."""
    note = Payoff.note_body
    monkeypatch.setattr(Payoff, "note_body", lambda self, _: note(self, seconds))
    monkeypatch.setattr(payoff, "_LEAST", payoff._AROUND)
    captured = capture(body)
    for number in range(DECIDED + 4):
        x = torch.full((3,), float(number))
        assert bits(captured(x)) == bits(body(x))
    counters = recordings(captured)
    assert counters.measured_calls == BODIES
    assert bool(counters.sizes) is stays
    assert (counters.replays, counters.eager_calls) == ((AFTER + 10, 0) if stays else (AFTER + 1, 9))
    slow = [finding.code for finding in counters.findings if finding.code != "CG201"]
    assert slow == ([] if stays else ["CG902"])


MANY = [[number, float(number)] for number in range(2000)]


def walking(x: Tensor) -> Tensor:
    """One that replays segment by segment, and reads so much state that to look at it takes as long as the rest."""
    y = torch.tanh(x) * MANY[0][1] + sum(pair[0] for pair in MANY)
    return y + 1 if len(torch.nonzero(y > 0)) else y - 1


@pytest.mark.usefixtures("one_round")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
def test_what_comes_before_a_replay_through_python_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find out that a recording fits takes time in each call, whatever goes on then."""
    noted: list[Payoff] = []
    note = Payoff.note_body

    def note_too(self: Payoff, seconds: float) -> None:
        noted.append(self)
        note(self, seconds)

    monkeypatch.setattr(Payoff, "note_body", note_too)
    captured = capture(walking)
    whole: list[float] = []
    for number in range(DECIDED + 4):
        x, before = torch.full((3,), float(number + 1)), recordings(captured).replays
        begin = time.thread_time()
        captured(x)
        took = time.thread_time() - begin
        if recordings(captured).replays > before and len(whole) < AFTER:
            whole.append(took)
    assert sorted(noted[0].replays)[AFTER // 2] > 0.8 * sorted(whole)[AFTER // 2]


@pytest.mark.usefixtures("one_round")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
def test_the_rest_of_a_step_is_measured_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording of the second follows on that of the first: it is not made again beside it. Neither is dropped, as
    slow as a busy machine has it be."""
    monkeypatch.setattr(payoff, "_LEAST", 1.0)
    first, second = capture(tiny), capture(tiny)
    for number in range(DECIDED + 4):
        x = torch.full((3,), float(number))
        assert torch.equal(second(first(x)), tiny(tiny(x)))
    assert [recordings(function).measured_calls for function in (first, second)] == [BODIES, BODIES]
    assert [recordings(function).recordings for function in (first, second)] == [1, 1]


@pytest.fixture
def works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is one of a device that works on while the host goes on."""
    if not OWN_MEMORY:
        monkeypatch.setattr(CpuBackend, "has_own_memory", True)


@pytest.mark.usefixtures("works_on")
@pytest.mark.parametrize(
    ("replay", "measured", "stays"), [(1e-6, False, True), (25e-6, True, True), (300e-6, True, False)]
)
def test_on_a_device_what_takes_the_host_long_is_measured(
    replay: float, measured: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(body=40e-6, replay=replay).replace(monkeypatch)
    captured = payoff.clock.function = capture(tiny)  # type: ignore[attr-defined]
    for number in range(DECIDED * ROUNDS):
        x = torch.full((3,), float(number), device=DEVICE)
        assert torch.equal(captured(x), tiny(x))
    counters = recordings(captured)
    assert bool(counters.measured_calls) is measured
    assert bool(counters.replays > DECIDED) is stays


@pytest.mark.usefixtures("works_on")
def test_on_a_device_nothing_large_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body would take as much memory again."""
    monkeypatch.setattr(eager_call, "_MUCH", 0)
    Clock(body=40e-6, replay=300e-6).replace(monkeypatch)
    captured = payoff.clock.function = capture(tiny)  # type: ignore[attr-defined]
    for number in range(DECIDED):
        captured(torch.full((3,), float(number), device=DEVICE))
    assert recordings(captured).measured_calls == 0


def test_what_is_in_doubt() -> None:
    timed = Payoff()
    for number in range(AFTER):
        assert timed.is_in_doubt(10), number
        timed.note_replay(30e-6)
    assert (timed.is_in_doubt(10), timed.wants_body) == (True, True)
    assert (timed.is_in_doubt(20), timed.wants_body) == (False, False)
    assert timed.loss == 0.0


def test_nothing_is_measured_where_slow_recordings_stay() -> None:
    captured = capture(tiny)
    with config.patch(drop_slow=False):
        for number in range(DECIDED):
            captured(torch.full((3,), float(number)))
    assert recordings(captured).measured_calls == 0


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x)))
        return result


def gradients(model: Any, parameters: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    model(x).square().sum().backward()
    return [made for parameter in parameters for made, parameter.grad in ((parameter.grad, None),) if made is not None]


def gradients_asked_for(model: Any, parameters: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    """No node of a parameter runs."""
    return list(torch.autograd.grad(model(x).square().sum(), parameters))


@pytest.mark.usefixtures("one_round")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
@pytest.mark.parametrize("gradients", [gradients, gradients_asked_for])
@pytest.mark.parametrize(("seconds", "stays"), [(1e-9, False), (1.0, True)])
def test_forward_and_backward_passes_are_measured_together(
    monkeypatch: pytest.MonkeyPatch, gradients: Any, seconds: float, *, stays: bool
) -> None:
    """Forward runs of the body are said to take no time, its backward passes ``seconds``."""
    body, backward = Payoff.note_body, Payoff.note_backward

    def told(self: Payoff, measured: float | None, *, is_replay: bool) -> None:
        backward(self, measured if is_replay or measured is None else seconds, is_replay=is_replay)

    monkeypatch.setattr(Payoff, "note_body", lambda self, _: body(self, 0.0))
    monkeypatch.setattr(Payoff, "note_backward", told)
    monkeypatch.setattr(payoff, "_LEAST", payoff._AROUND)
    model = Layers()
    plain = copy.deepcopy(model)
    captured, ours, theirs = capture(model), list(model.parameters()), list(plain.parameters())
    with torch.enable_grad():
        for number in range(DECIDED + 4):
            x = torch.full((2, 4), float(number))
            captured_gradients, expected = gradients(captured, ours, x), gradients(plain, theirs, x)
            assert all(map(torch.equal, captured_gradients, expected))
    told_of = recordings(captured)
    assert told_of.measured_calls == BODIES + 1
    assert bool(told_of.sizes) is stays
    assert [finding.code for finding in told_of.findings if finding.code == "CG902"] == ([] if stays else ["CG902"])


@pytest.mark.usefixtures("one_round")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
def test_forward_passes_alone_are_measured_alone() -> None:
    model = Layers()
    captured = capture(model)
    with torch.enable_grad():
        for number in range(DECIDED + 4):
            captured(torch.full((2, 4), float(number)))
    assert recordings(captured).measured_calls == BODIES


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
def test_pointing_a_recording_elsewhere_in_each_call_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    state = [torch.zeros(3)]

    def adds(x: Tensor) -> Tensor:
        return torch.tanh(x) + state[0]

    captured = clock_of = capture(adds)
    clock = Clock(body=20e-6, replay=80e-6)
    clock.function = clock_of
    clock.replace(monkeypatch)
    kept = []
    for number in range(DECIDED + 6):
        kept.append(state[0])
        state[0] = torch.full((3,), float(number))
        x = torch.ones(3) * number
        assert torch.equal(captured(x), adds(x))
    counters = recordings(captured)
    assert "CG902" in [finding.code for finding in counters.findings]
    assert counters.measured_calls == BODIES


@pytest.mark.usefixtures("one_round")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
def test_nothing_looks_at_backward_passes_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    note = BackwardTimer._note_end

    def noted(self: BackwardTimer, given: Any) -> None:
        seen.append(number)
        note(self, given)

    monkeypatch.setattr(BackwardTimer, "_note_end", noted)
    model = Layers()
    captured, parameters = capture(model), list(model.parameters())
    with torch.enable_grad():
        for number in range(DECIDED + 10):
            gradients(captured, parameters, torch.full((2, 4), float(number)))
    assert recordings(captured).measured_calls == BODIES + 1
    assert seen
    assert max(seen) < DECIDED


@pytest.mark.usefixtures("one_round")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device works on while the host goes on")
def test_calls_of_other_shapes_and_errors_end_no_trial_wrongly() -> None:
    """While the body is measured calls go straight to it: whatever comes then is as in eager code."""

    def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
        if x.dim() == 2:
            raise ValueError(f"{x.shape}")
        return torch.tanh(x) * scale

    captured = capture(scaled)
    for number in range(AFTER + 4):
        captured(torch.full((3,), float(number)))
    before = recordings(captured)
    assert 0 < before.measured_calls < BODIES
    for number in range(2 * BODIES + 4):
        x = torch.full((3 + number % 2,), float(number))
        assert torch.equal(captured(x, scale=3.0), scaled(x, scale=3.0))
        with pytest.raises(ValueError, match="2"):
            captured(torch.ones(2, 2))
    for number in range(DECIDED):
        x = torch.full((3,), float(number))
        assert torch.equal(captured(x), scaled(x))
    assert recordings(captured).measured_calls > before.measured_calls


@pytest.mark.skipif(DEVICE.type != "cpu", reason="measured by the clock of the CPU's own thread")
def test_numbers_beside_state_that_moves_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fast path takes such calls, which are found anew each time: the replays themselves are timed."""

    class Normalizer:
        def __init__(self) -> None:
            self.mean, self.count = torch.zeros(3), 1

        def step(self, x: Tensor) -> Tensor:
            self.count += 1
            self.mean = self.mean + (x - self.mean) / self.count
            return x - self.mean

    clock, own, other = Clock(1e-4, 1e-3), Normalizer(), Normalizer()
    step = clock.function = capture(own.step)
    with config.patch(drop_slow=False):  # else these few calls are worth no effort
        for number in range(12):
            assert torch.equal(step(torch.ones(3) * number), other.step(torch.ones(3) * number))
    assert recordings(step).replays >= 4
    clock.replace(monkeypatch)
    for number in range(12, 12 + 3 * DECIDED):
        assert torch.equal(step(torch.ones(3) * number), other.step(torch.ones(3) * number))
    counters = recordings(step)
    assert (own.count, counters.measured_calls) == (other.count, BODIES), str(counters)
    assert "CG902" in [finding.code for finding in counters.findings]
