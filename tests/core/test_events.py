"""The log of events: what is timed, how many bytes it has, and that it shows in profiler traces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from capture import Event, Recordings, capture, config, mark_step_begin, recordings, report, warmup
from capture.core import events as _events
from capture.core.events import Counters, EventKind, Log, parse_logs
from capture.native import native
from capture.torch_private import capabilities
from capture.tree import thread_trees
from tests.support.device import DEVICE, EXECUTES


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    thread_trees.forget_trees()
    with torch.no_grad(), config.patch(cache=False):
        yield


def ranges(run: profile) -> list[str]:
    """Names of our ranges in a trace, in the order of their begin."""
    events: Any = run.events()
    return [one.name for one in sorted(events, key=lambda e: e.time_range.start) if one.name.startswith("capture::")]


def body(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 + 1


@pytest.mark.parametrize("kind", get_args(EventKind))
def test_every_kind_can_be_printed(kind: EventKind) -> None:
    assert parse_logs("all")[kind] == logging.INFO


@pytest.mark.parametrize(
    ("word", "kinds"), [("recordings", {"create", "instantiate", "record"}), ("runtime", {"restore"})]
)
def test_the_engines_events_have_their_words(word: str, kinds: set[str]) -> None:
    assert kinds <= set(parse_logs(word))


def test_a_timed_block_has_time_bytes_and_detail() -> None:
    log = Log("f")
    with log.timed("instantiate", "graph 1", nbytes=5):
        pass
    with log.timed("create") as timed:
        timed.nbytes, timed.detail = 7, "3 nodes"
    with pytest.raises(LookupError), log.timed("restore", "half", nbytes=9):
        raise LookupError
    assert [(event.kind, event.function, event.detail, event.nbytes) for event in log.events] == [
        ("instantiate", "f", "graph 1", 5),
        ("create", "f", "3 nodes", 7),
        ("restore", "f", "half", 9),
    ]
    assert all(event.ms > 0 and event.at > 0 for event in log.events)


def test_events_are_printed_with_time_and_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_events, "_levels", parse_logs("recordings"))
    log = Log("f")
    with caplog.at_level(logging.INFO, logger="capture"):
        with log.timed("create", "3 nodes", nbytes=1500):
            pass
        log.add("rebind", "x")
        log.add("restore", "not asked for")
    first, second = caplog.messages
    assert first.startswith("create f: 3 nodes (")
    assert first.endswith(" ms, 1500 bytes)")
    assert second == "rebind f: x (0.00 ms)"


def test_the_log_is_handed_out_frozen_and_in_order() -> None:
    captured = capture(body)
    for _ in range(3):
        captured(torch.ones(2))
    events = recordings(captured).events
    assert [type(event) for event in events] == [Event] * len(events)
    parts = () if EXECUTES else ("checkpoint", "create", "instantiate")  # CUDA lays the pool out each time
    kinds = [event.kind for event in events if event.kind not in parts]
    assert kinds in (["observe", "plan", "record"], ["observe", "record"])
    assert [event.at for event in events] == sorted(event.at for event in events)
    with pytest.raises(AttributeError):
        events[0].ms = 1.0  # type: ignore[misc]


def test_timed_blocks_and_recordings_are_ranges_in_a_trace() -> None:
    captured = capture(body, name="my.module.fn", warmup=2)
    second = capture(body, name="other")
    with profile(activities=[ProfilerActivity.CPU]) as run:
        for _ in range(2):
            for _ in range(4):
                mark_step_begin()
                captured(torch.ones(2))
            warmup(second)(torch.ones(3))
    all_names = ranges(run)
    names = [name for name in all_names if not name.startswith("capture::replay ")]
    if not EXECUTES:  # CUDA lays the pool out before each recording
        names.remove("capture::checkpoint my.module.fn")
    assert names == [
        "capture::observe my.module.fn",
        "capture::warm-up my.module.fn",
        "capture::record my.module.fn",
        "capture::observe other",
        "capture::checkpoint other",
        "capture::record other",
    ]
    assert all_names.count("capture::replay my.module.fn") == recordings(captured).replays


def test_a_range_closes_when_the_body_raises() -> None:
    def fails(x: Tensor) -> Tensor:
        raise LookupError

    captured = capture(fails, name="fails")
    with profile(activities=[ProfilerActivity.CPU]) as run:
        with pytest.raises(LookupError):
            captured(torch.ones(2))
        torch.ones(3) + 1
    events: Any = run.events()
    (observe,) = [event for event in events if event.name == "capture::observe fails"]
    (add,) = [event for event in events if event.name == "aten::add"]
    assert observe.time_range.end <= add.time_range.start


class Scale(torch.nn.Module):
    """A body with a read, which Python replays, and one without, which C does."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    @capture
    @override
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y + 1 if self.reads and y.sum() > 0 else y - 1


@pytest.mark.filterwarnings("ignore::capture.CaptureWarning")
@pytest.mark.parametrize("reads", [False, True])
def test_a_replay_is_a_range_with_the_names_of_module_and_function(reads: bool) -> None:
    scale = Scale(reads)
    for _ in range(4):
        scale(torch.ones(2))
    before = recordings(scale.forward).replays
    with profile(activities=[ProfilerActivity.CPU]) as run:
        for _ in range(3):
            scale(torch.ones(2))
    assert recordings(scale.forward).replays == before + 3
    assert ranges(run) == [f"capture::replay {__name__}.Scale.forward"] * 3
    operators = [event for event in run.events() if event.name == "aten::mul"]
    replays = [event for event in run.events() if event.name.startswith("capture::")]
    assert all(
        any(outer.time_range.start <= operator.time_range.start <= outer.time_range.end for outer in replays)
        for operator in operators
    )


def test_a_range_that_fails_stops_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, flag = capture(body), capabilities.profiler_flag()
    assert flag is not None
    for _ in range(4):
        captured(torch.ones(2))
    before = recordings(captured).replays
    tried: list[str] = []

    def fails(name: str) -> AbstractContextManager[None]:
        tried.append(name)
        raise LookupError

    try:
        native.use_profiler({"on": True}, "on", fails)
        assert torch.equal(captured(torch.ones(2)), body(torch.ones(2)))
    finally:
        native.use_profiler(*flag, capabilities.profiler_range)
    assert (len(tried), recordings(captured).replays) == (1, before + 1)


def test_values_are_the_same_under_a_profiler() -> None:
    captured = capture(body)
    with profile(activities=[ProfilerActivity.CPU]):
        for seed in range(5):
            x = torch.randn(3, generator=torch.Generator(DEVICE).manual_seed(seed))
            assert torch.equal(captured(x), body(x))
    assert (recordings(captured).recordings, recordings(captured).replays) == (1, 3)


def test_ranges_are_entered_only_while_a_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def noting(name: str) -> AbstractContextManager[None]:
        entered.append(name)
        return nullcontext()

    for running in (False, True):
        profiler = _events.Profiler(is_running=lambda running=running: running, enter=noting)  # type: ignore[misc]
        monkeypatch.setattr(_events, "_profiler", profiler)
        with Log("f").timed("create"), Log("f").range("record"):
            pass
    assert entered == ["capture::create f", "capture::record f"]


def test_the_probe_tells_a_running_profiler() -> None:
    assert not capabilities.is_profiling()
    with profile(activities=[ProfilerActivity.CPU]):
        assert capabilities.is_profiling()
    assert not capabilities.is_profiling()


# ------------------------------------------------------------------------------------------------------------- counters


def test_a_counter_is_said_in_one_place() -> None:
    """A counter's name is declared once in the package, beside where it is counted; all that shows it reads that
    list."""
    names = {field.name for field in attrs.fields(Counters)}
    assert names <= {field.name for field in attrs.fields(Recordings)}
    of_other_things = ("budget.py", "facts.py", "entry.py")  # of efforts and branches, which have names like counters
    paths = [path for path in Path(_events.__file__).parents[1].rglob("*.py") if path.name not in of_other_things]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    for name in names:
        assert text.count(f"\n    {name}: int") == 1, name


def test_counters_of_all_instances_are_added_up() -> None:
    class Twice:
        @capture
        def step(self, x: Tensor) -> Tensor:
            return torch.relu(x) * 2

    for instance in (first := Twice(), second := Twice()):
        for _ in range(4):
            instance.step(torch.ones(2))
    counted = recordings(Twice.step)
    assert (counted.observations, counted.recordings, counted.replays, counted.body_runs) == (2, 2, 4, 4)
    assert counted.replays == recordings(first.step).replays + recordings(second.step).replays
    assert str(recordings(first.step)).endswith(": 4 calls: 2 replayed, 1 recorded, 1 watched; 1 recording")
    assert str(counted).endswith(": 8 calls: 4 replayed, 2 recorded, 2 watched; 2 recordings")
    assert any("Twice.step, 2 instances" in line and "50 %" in line for line in report().splitlines())
