"""Whatever stops a call in the middle of this library: the exception comes out, the state is one that eager leaves when
it is stopped, and all that follows equals eager. ``make fuzz-faults`` stops calls at very many points.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext
from typing_extensions import override

from capture import capture, config
from capture.core.interrupts import is_interrupt
from capture.engines.cpu.tape import Tape
from capture.native import native
from capture.observe import operator_schema, run
from capture.observe.capture_lock import capture_lock
from capture.observe.dispatch_mode import ObserveMode
from capture.runtime import record
from capture.torch_private import devices
from capture.torch_private.subclasses import unseen
from capture.tree import thread_trees
from tests.support.device import DEVICE
from tests.support.injection import (
    BODIES,
    ERRORS,
    Stopped,
    Stopping,
    calls_of,
    listing,
    points,
    points_in,
    stopped_program,
)

on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU has no streams")
on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="a function of the CPU engine")
PARTS = len(BODIES)
COUNT = int(os.environ.get("CAPTURE_FAULTS", "36")) // PARTS
"""Faults that each part injects."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Inference, no plans on disk, no tree of another test."""
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False, strict=False):
        yield


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_stopped_anywhere(part: int) -> None:
    """At a call, or at a line, of this library, with one of several exceptions."""
    fuzzing = "CAPTURE_FAULTS" in os.environ
    drawn = random.Random(time.time_ns() if fuzzing else part)
    body = sorted(BODIES)[part]
    wrong, counts = [], dict[tuple[bool, int], int]()
    for _ in range(COUNT):
        calls = [*calls_of(body), 2, 2]
        call, error, lines = drawn.choice(calls), drawn.choice(ERRORS), drawn.choice([False, True])
        if (lines, call) not in counts:
            points(body, call, lines=lines)  # what is done once is done
            counts[lines, call] = points(body, call, lines=lines)
        at, by_signal = drawn.randint(1, max(counts[lines, call], 1)), drawn.choice([False, True])
        outcome = stopped_program(body, call, at, error, lines=lines, by_signal=by_signal)
        if outcome.wrong:
            wrong.append((body, call, at, error.__name__, lines, by_signal, outcome.where, outcome.wrong))
    assert not wrong, "\n".join(map(str, wrong))


_STEPS = {
    "Tree._pin", "Tree._pins_in_use", "pins_of", "leave", "Tree._make_owned", "Node.make_owned", "Node.is_in_the_way",
    "OutputPlan.make_owned", "Tape.make_owned", "Tape.avoid", "Tape.rebind", "Tape._point_at", "state_moved", "_settle",
    "RecordingGuard.follow", "perform.<locals>.commit", "_Walk._run_island.<locals>.settle",
}  # fmt: skip
"""What changes a recording that is there, or whose memory is whose, in several steps."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", ["recurrent", "drawing", "keeping", "around_an_island"])
def test_stopped_while_a_recording_is_changed(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each line: the recording is what it was, or as it is to be, or is not used again."""
    monkeypatch.setattr(record, "MOST_OWNED", 0)  # small outputs come to be owned as large ones do
    for _ in range(2):
        places = {call: points_in(body, call, _STEPS) for call in (3, 4)}
    assert any(places.values())
    wrong = [
        (call, at, outcome.where, outcome.wrong)
        for call, points_here in places.items() for at in points_here
        if (outcome := stopped_program(body, call, at, KeyboardInterrupt, lines=True)).wrong
    ]  # fmt: skip
    assert not wrong, wrong


def wrong_at(
    body: str, call: int, places: Sequence[int], error: type[BaseException] = MemoryError, *, by_signal: bool = False
) -> list[Any]:
    """Of these lines of a call, those at which it leaves something else than eager where it is stopped there."""
    assert places
    outcomes = [(at, stopped_program(body, call, at, error, lines=True, by_signal=by_signal)) for at in places]
    return [(at, outcome.where, outcome.wrong) for at, outcome in outcomes if outcome.wrong]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", ["numbered_state", "recurrent"])
def test_stopped_while_a_run_is_compared(body: str) -> None:
    """What a run did that only captures is undone, also where it is not yet known. A GPU captures numbers once more."""
    places = points_in(body, 2, {"changes", "changes_of_body", "_compare"})
    wrong = wrong_at(body, 2, places[:: max(len(places) // 8, 1)])
    assert not wrong, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("body", "call", "functions"),
    [
        ("leaving_gradients", 4, {"Staging.end_run", "Tape._kind_of_value", "_record"}),
        ("counting", 3, {"numpy_random.<locals>.<genexpr>", "opens_numbers", "Captured.take_numbers"}),
        pytest.param("around_an_island", 4, {"SegmentedTape.segment"}, marks=on_cpu),
        pytest.param("raising", 4, {"Answers._answered"}, marks=on_cpu),
    ],
)
def test_a_fault_at(body: str, call: int, functions: set[str]) -> None:
    """A gradient of an argument, and a number in one: the call is completed with what is there. A last segment that did
    not begin after an island ran. The answer to an operator of a body that goes on."""
    points(body, call, lines=True)
    places = points_in(body, call, functions)
    wrong = wrong_at(body, call, places[:: max(len(places) // 8, 1)])
    assert not wrong, wrong


@on_gpu
@pytest.mark.filterwarnings("ignore")
def test_stopped_while_the_stream_is_put_back() -> None:
    """After a capture that was refused, which the call deals with: the interrupt must come out all the same."""
    points("numbered_state", 2, lines=True)
    places = points_in("numbered_state", 2, {"set_stream"})
    wrong = wrong_at("numbered_state", 2, places[:: max(len(places) // 40, 1)], RuntimeError)
    assert not wrong, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_signal", [False, True])
def test_an_operator_runs_once(by_signal: bool) -> None:
    """Stopped right after an operator that writes: it must not run again, as where the watch failed before it."""
    points("writing", 1, lines=True)
    places = points_in("writing", 1, {"ObserveMode.operate"})
    wrong = wrong_at("writing", 1, places[:24], by_signal=by_signal)
    assert not wrong, wrong


def test_stopped_while_blocks_of_autocast_are_counted() -> None:
    """Torch tells the number of this thread's blocks by opening one more. Left open, it keeps what autocast casts of
    weights for all that follows."""

    def stop_at(at: int) -> bool:
        """Raise at this event of the function; whether there is one."""
        left = at

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code is not devices.autocast_depth.__code__:
                return None
            left -= 1
            if left == 0 and event != "exception":
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            assert devices.autocast_depth() == 0
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return left <= 0

    events = 0
    while stop_at(events + 1):
        events += 1
        assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)
    assert events > 2


class _InDefaultDevice(Stopping):
    """Counts the lines of the mode of a default device: Python code, which C runs wherever it asks a tensor."""

    @override
    def _count(self, frame: FrameType) -> None:
        if frame.f_code is DeviceContext.__torch_function__.__code__:
            super()._count(frame)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("body", ["training", "plain"])
def test_stopped_in_the_mode_of_a_default_device(body: str) -> None:
    """What C drops of it comes out as well: no interrupt is lost."""
    with torch.device(DEVICE):
        for _ in range(3):
            count = stopped_program(body, 4, -1, Stopped, lines=True, kind=_InDefaultDevice).events
        wrong = [
            (at, outcome.where, outcome.wrong) for at in range(1, count + 1, max(count // 60, 1))
            if (outcome := stopped_program(body, 4, at, Stopped, lines=True, kind=_InDefaultDevice)).wrong
        ]  # fmt: skip
    assert not wrong, wrong


_CAPTURES = {
    "unbroken", "unbroken.<locals>.mend", "Capture.running", "Capture.pause", "Capture.resume", "Capture.aside",
    "Capture._begin", "Capture._end", "CudaPool.open", "CudaPool.stream", "CudaPool.begin_capture",
    "CudaPool.end_capture", "CudaPool.stop_capture", "end_stopped_capture", "_done", "_capture_nothing",
    "stop_allocating", "has_ended", "warned", "in_order", "_after_last", "CpuBackend.record",
    "TapeRecorder.end_at_island",
}  # fmt: skip
"""What begins and ends the capture of a graph, and what does so where a recording is a tape."""


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stopped])
@pytest.mark.parametrize("body", ["numbered_state", "around_an_island", "keeping", "drawing"])
def test_stopped_while_a_capture_begins_or_ends(body: str, error: type[BaseException]) -> None:
    """No capture goes on, and no generator waits for one to end. An exception that a signal's handler raises may be of
    the kind that torch raises where a capture fails."""
    wrong = []
    for call in (2, 3, 4):
        for _ in range(2):  # what is done once is done
            places = points_in(body, call, _CAPTURES)
        for at in places[:: max(len(places) // 16, 1)]:
            outcome = stopped_program(body, call, at, error, lines=True, by_signal=error is not Stopped)
            wrong += [(call, at, outcome.where, outcome.wrong)] * bool(outcome.wrong)
            torch.rand(2)
    assert not wrong, wrong


@pytest.mark.parametrize("lines", [True, False])
def test_torch_functions_stay_on_where_a_call_that_hides_them_is_stopped(lines: bool) -> None:
    """Also on the way out of the block, whose own end nothing calls then."""

    @unseen
    def asked(x: Tensor) -> int:
        return x.dim()

    x = torch.ones(2)
    with Stopping(-1, ValueError, lines=lines) as counting:
        asked(x)
    assert counting.count > 1
    for at in range(1, counting.count + 1):
        with pytest.raises(ValueError, match="stopped"), Stopping(at, ValueError, lines=lines) as stopping:
            asked(x)
        assert torch._C._is_torch_function_enabled(), stopping.where
    with torch._C.DisableTorchFunctionSubclass():
        assert asked(x) == 1
        assert not torch._C._is_torch_function_enabled()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.h = nn.Linear(8, 8), torch.zeros(4, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu() + 1
        for _ in range(20):
            y = y * 1.01
        self.h = torch.tanh(y + self.h)
        result: Tensor = y + self.h
        return result


def goes_on_as_eager(ours: Any, model: nn.Module) -> bool:
    """Whether calls go on as eager ones from the present state, and what the caller keeps stays as it is."""
    eager, x = Net(), torch.ones(4, 8)
    eager.load_state_dict(model.state_dict())
    kept: Any = model.h
    before = kept.clone()
    eager.h = kept.clone()
    for _ in range(3):
        if not torch.equal(ours(x), eager(x)):
            return False
    return torch.equal(kept, before) and torch.equal(model.h, eager.h)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_no_memory_after_the_body_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of the run and the recording in the tree."""
    neighbour = capture(lambda x: x.tanh() * 2 + x.exp(), name="other")
    for _ in range(4):
        neighbour(torch.ones(4, 8))
    model, eager = Net(), Net()
    f, x = capture(model), torch.ones(4, 8)
    f(x), eager(x)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Tape, "compile", fails)
        assert torch.equal(f(x), eager(x))
    assert torch.equal(model.h, eager.h)
    assert goes_on_as_eager(f, model)


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
def test_a_mistake_of_the_library_costs_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in its own code, before the body ran or after it."""
    model, eager = Net(), Net()
    f, x = capture(model), torch.ones(4, 8)
    f(x), eager(x)
    for name in ("compile", "__init__"):
        with monkeypatch.context() as patch:
            patch.setattr(Tape, name, native.guarded)  # takes other arguments
            assert torch.equal(f(x), eager(x)), name
            assert torch.equal(model.h, eager.h), name
    assert goes_on_as_eager(f, model)


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError, KeyError])
@pytest.mark.parametrize("call", [1, 2])
def test_errors_after_the_body_ran_leave_what_one_run_did(
    call: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may be full by then, too: an engine must not take the body for one that did not run."""

    def fails(*_: object) -> None:
        raise error("no more")

    model, eager = Net(), Net()
    f, x = capture(model), torch.ones(4, 8)
    for _ in range(call - 1):
        f(x), eager(x)
    with monkeypatch.context() as patch:
        patch.setattr(run, "_compare", fails)
        assert torch.equal(f(x), eager(x))
    assert torch.equal(model.h, eager.h)
    assert goes_on_as_eager(f, model)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an exception in a weak reference's callback goes no further
def test_timeouts_by_signals() -> None:
    """Servers stop requests in this way: the exception comes out, and nothing is wrong afterwards."""
    came_out = 0

    def ring(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for number in range(25):
            model = Net()
            f, x = capture(model), torch.ones(4, 8)
            f(x)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + number * 0.0004)
                f(x)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stopped:
                came_out += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert goes_on_as_eager(f, model), number
    finally:
        signal.signal(signal.SIGALRM, before)
    assert came_out


def test_a_timeout_in_an_operator_says_nothing_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why an operator raised is found by running it on shapes alone, for which torch may import its compiler."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Stopped

    def run(watch: ObserveMode, function: Any, args: Any, kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return function(*args, **kwargs)

    looked: list[Any] = []
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(ObserveMode, "run", run)
            patch.setattr(operator_schema, "raises_on_shapes", lambda *call: looked.append(call))
            with pytest.raises(Stopped):
                capture(lambda x: x + 1)(torch.ones(3))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not looked


def test_whose_exception_it_is() -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(Stopped) as stopped:
            signal.raise_signal(signal.SIGUSR1)
        assert is_interrupt(stopped.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert is_interrupt(KeyboardInterrupt())
    assert not is_interrupt(ValueError())
    with pytest.raises(RuntimeError) as failed:
        nn.Linear(2, 2)(torch.ones(3))
    assert not is_interrupt(failed.value)


def test_what_puts_things_right_is_called_until_it_ends_well() -> None:
    calls: list[int] = []
    verdict: list[Any] = [None]

    def mend(errors: list[BaseException]) -> Any:
        calls.append(len(errors))
        if len(calls) < 4:
            raise KeyboardInterrupt
        return verdict[0]

    def fails(error: BaseException) -> None:
        raise error

    for verdict[0], expected in ((None, ValueError), (OSError("other"), OSError)):
        calls.clear()
        with pytest.raises(expected):
            native.guarded(fails, (ValueError("first"),), mend)
        assert calls == [1, 2, 3, 4]
    verdict[0] = ("result",)
    assert native.guarded(fails, (ValueError("first"),), mend) == "result"
    assert native.guarded(max, (1, 2), fails) == 2
    for arguments in ((), (max, [1, 2], fails), (max, (1, 2))):
        with pytest.raises(TypeError):
            native.guarded(*arguments)


def test_what_never_ends_well_is_given_up() -> None:
    count: list[int] = []

    def mend(errors: list[BaseException]) -> None:
        count.append(len(errors))
        raise RuntimeError

    with pytest.raises(ZeroDivisionError):
        native.guarded(divmod, (1, 0), mend)
    assert 10 < len(count) < 1000


_ENDS = {
    "Commit.run", "Commit.resumed", "Commit.resumed.<locals>.ended", "locked_or", "locked_or.<locals>.run", "locked",
    "_held", "_Patience.__init__", "_resumed",
}  # fmt: skip
"""What follows an operator that raises in a replay."""


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stopped])
def test_stopped_while_an_operator_raises_in_a_replay(error: type[BaseException]) -> None:
    """Other threads may record after that: the lock of captures is free. On the CPU: a kernel of a device ends all
    work of the process where an index is out of range."""
    words, table = torch.tensor([1, 2], device="cpu"), torch.arange(20.0, device="cpu").view(5, 4)

    def lookup(at: Tensor) -> Tensor:
        try:
            return torch.embedding(table, at) * 2
        except IndexError:
            return table * 3

    def may_be_stopped(at: int, *, kind: type[Stopping] = Stopping) -> Stopping:
        f = capture(lookup)
        for _ in range(3):
            f(words)
        with contextlib.suppress(error), (stopping := kind(at, error, lines=True, by_signal=error is not Stopped)):
            assert torch.equal(f(torch.tensor([1, 9], device="cpu")), table * 3)
        assert not capture_lock._is_owned(), stopping.where
        assert torch.equal(f(words), lookup(words))
        return stopping

    places: list[int] = []
    for _ in range(2):
        places.clear()
        may_be_stopped(-1, kind=listing(_ENDS, places))
    assert places
    for at in places:
        may_be_stopped(at)


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("call", [2, 3, 4])
def test_an_exception_goes_without_the_collector(call: int, lines: bool) -> None:
    """It has the frames that it passed. Of eager code nothing outlives it, so a recording's outputs must not."""

    def stopped(at: int) -> tuple[Stopping, bool]:
        f, x = capture(lambda x: (torch.relu(x * 2) + 1, x.sum())), torch.randn(8, 4)
        for _ in range(call):
            f(x)
        raised = None
        try:
            with Stopping(at, Stopped, lines=lines, by_signal=True, below=False) as stopping:
                f(x)
        except Stopped as error:
            raised = weakref.ref(error)
        return stopping, raised is not None and raised() is not None

    gc.collect()
    gc.disable()
    try:
        stopped(-1)
        count = stopped(-1)[0].count
        outcomes = [stopped(at) for at in range(1, count + 1, max(count // 40, 1))]
    finally:
        gc.enable()
    assert not [stopping.where for stopping, is_left in outcomes if is_left]


@pytest.mark.one_in(2)
@pytest.mark.skipif("raising" not in BODIES, reason="an index out of range ends all work of a GPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", ["changes", "Commit.finish"])
def test_an_interrupt_beside_a_body_that_goes_on_comes_out(function: str) -> None:
    """An operator raised in a replay, which is ended, and what the body did then is compared with the state before."""
    for _ in range(2):
        places = points_in("raising", 4, {function})
    wrong = wrong_at("raising", 4, places[:12], Stopped, by_signal=True)
    assert not wrong, wrong
