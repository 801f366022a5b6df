"""Dicts of which code only looks members up by key: guards are about those members, and about nothing else of them."""

from __future__ import annotations

import itertools
import logging
import pickle
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from capture.engines.cpu.engine import CpuBackend, TapeRecorder
from capture.state import keyed_reads
from tests.support.device import DEVICE, EXECUTES


class Registry:
    """Values by name, as libraries keep loggers, activations and adapters."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {"a": 2.0, "b": 3.0, ("c",): 4.0}

    def find(self, name: Any) -> Any:
        return self.known[name] if name in self.known else -1.0  # noqa: SIM401 - two ways to look it up

    def get(self, name: Any, other: float = 0.5) -> Any:
        return self.known.get(name, other)

    def both(self, name: str) -> Any:
        return self.known[name] + self.known["b"]

    def moved(self, name: str) -> Any:
        name = chr(ord(name) + 1)
        return self.known[name]

    def among(self, name: str) -> Any:
        return self.known[name] + len(self.known)

    def first(self) -> Any:
        return self.known["a"]

    def first_or(self) -> Any:
        return self.known.get("a", 0.25)

    def first_or_missing(self) -> Any:
        return self.known.get("z", 0.25)

    def first_by_another_name(self) -> Any:
        known = self.known
        return known["a"] + len(known)

    def first_and_one_given(self) -> Any:
        self.known["b"] = 3.0
        return self.known["a"]

    def first_inside(self) -> Any:
        known = self.known

        def look() -> Any:
            return known["a"] + sum(known[key] for key in ("a", "b") if key in known)

        return look()

    def all_of(self) -> Any:
        return sum(each for each in self.known.values())


class Program:
    def __init__(self, read: Callable[[Registry, Program], float]) -> None:
        self.registry, self.read, self.key = Registry(), read, "a"
        self.alias = self.registry.known if "alias" in read.__code__.co_names else None

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.read(self.registry, self)


READS: dict[str, tuple[Callable[[Registry, Any], float], bool]] = {
    "in and []": (lambda registry, _: registry.find("a"), True),
    "get": (lambda registry, _: registry.get("a"), True),
    "get of what is missing": (lambda registry, _: registry.get("z"), True),
    "by a constant, too": (lambda registry, _: registry.both("a"), False),
    "several keys": (lambda registry, _: registry.find("a") + registry.find("b"), False),
    "a key from state": (lambda registry, program: registry.find(program.key), True),
    "another key than was given": (lambda registry, _: registry.moved("a"), False),
    "its length, too": (lambda registry, _: registry.among("a"), False),
    "all members elsewhere": (lambda registry, _: registry.find("a") + registry.all_of(), False),
    "the dict by another name": (lambda registry, program: registry.find("a") + len(program.alias), False),
    "a copy by C code": (lambda registry, _: registry.find("a") + len(pickle.dumps(registry)), False),
    "a constant": (lambda registry, _: registry.first(), True),
    "get of a constant": (lambda registry, _: registry.first_or(), True),
    "get of a constant that is missing": (lambda registry, _: registry.first_or_missing(), True),
    "a constant, by another name": (lambda registry, _: registry.first_by_another_name(), False),
    "a constant, and another one is given": (lambda registry, _: registry.first_and_one_given(), False),
    "a constant in a closure": (lambda registry, _: registry.first_inside(), False),
    "a constant, all members elsewhere": (lambda registry, _: registry.first() + registry.all_of(), False),
    "a constant, and a key": (lambda registry, _: registry.first() + registry.find("a"), True),
    "a key that is no text": (lambda registry, _: registry.find(("c",)), False),
}

CHANGES: dict[str, Callable[[Program], object]] = {
    "another member": lambda program: program.registry.known.update(b=7.0),
    "one more": lambda program: program.registry.known.update(z=5.0),
    "one less": lambda program: program.registry.known.pop("b"),
    "this member": lambda program: program.registry.known.update(a=9.0),
    "without it": lambda program: program.registry.known.pop("a"),
    "another dict": lambda program: setattr(program.registry, "known", {"a": 11.0, "b": 1.0, ("c",): 5.0}),
    "another key": lambda program: setattr(program, "key", "b"),
}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(keyed_reads, "_asked", weakref.WeakSet())  # each test begins like a new process
    with config.patch(cache=False), torch.no_grad():
        yield


def _outcome(function: Any, x: Tensor) -> Any:
    try:
        return function(x).tolist()
    except KeyError as error:
        return repr(error)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_shows(name: str, change: str) -> None:
    results, x = [], torch.ones(2, device=DEVICE)
    for is_ours in (True, False):
        program = Program(READS[name][0])
        function: Any = capture(program.__call__) if is_ours else program
        results.append([_outcome(function, x) for _ in range(5)])
        CHANGES[change](program)
        results[-1] += [_outcome(function, x) for _ in range(4)]
        results[-1].append({repr(key): value for key, value in program.registry.known.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("name", [name for name, (_, is_keyed) in READS.items() if is_keyed])
def test_other_members_do_not_count(name: str) -> None:
    program, x = Program(READS[name][0]), torch.ones(2, device=DEVICE)
    function = capture(program.__call__)
    for number in range(10):
        program.registry.known[number] = float(number)
        program.registry.known["b"] = float(number)
        assert torch.equal(function(x), program(x))
    # a run that only captures tells no keys: one more is watched before it
    assert recordings(function).replays >= (7 if EXECUTES else 6)


class Logs:
    """Two functions that keep what they read in one dict, each by a key of its own."""

    def __init__(
        self, made: Callable[[], dict[str, list[float]]], wrap: Callable[[Any], Any], *, keeps_best: bool
    ) -> None:
        self.keeps_best = keeps_best
        self.history = history = made()
        self.best = float("inf")
        self.weight = torch.ones(4, device=DEVICE)

        def test(x: Tensor) -> None:
            history["test"].append((x * self.weight).amax().item())

        train, self.test = wrap(self.train), wrap(test)
        self.train = train  # type: ignore[method-assign]

    def train(self, x: Tensor) -> Tensor:
        self.weight.mul_(0.5).add_(x)
        loss = self.weight.sum().item()
        self.history["train"].append(loss)
        if self.keeps_best:
            self.best = min(self.best, loss)
        return self.weight * 2

    def __call__(self, number: int, change: Callable[[dict[str, Any], int], object]) -> Any:
        x = torch.full((4,), float(number), device=DEVICE)
        result = self.train(x).tolist()
        if number % 2:
            self.test(x)
        change(self.history, number)
        return result, self.best, {key: [*members] for key, members in self.history.items()}


MADE: dict[str, Callable[[], dict[str, list[float]]]] = {
    "a dict": lambda: {"train": [], "test": []},
    "one that makes members": lambda: defaultdict(list),
}
BETWEEN: dict[str, Callable[[dict[str, Any], int], object]] = {
    "nothing": lambda history, number: None,
    "another list": lambda history, number: history.update(train=[]) if number % 8 == 7 else None,
    "an empty list": lambda history, number: history["train"].clear() if number % 8 == 7 else None,
    "another member": lambda history, number: history.update({str(number): [1.0]}),
    "one less": lambda history, number: history.pop("test", None) if number == 9 else history.setdefault("test", []),
    "no list": lambda history, number: history.update(train=deque(history["train"])) if number == 12 else None,
}


@pytest.mark.one_in(6)
@pytest.mark.skipif(not EXECUTES, reason="functions that read values run eagerly")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("keeps_best", [False, True])
def test_functions_that_log_in_one_dict(made: str, between: str, *, keeps_best: bool) -> None:
    captured = list[Any]()

    def wrap(function: Any) -> Any:
        captured.append(capture(function))
        return captured[-1]

    mine = Logs(MADE[made], wrap, keeps_best=keeps_best)
    theirs = Logs(MADE[made], lambda function: function, keeps_best=keeps_best)
    for number in range(30):
        assert mine(number, BETWEEN[between]) == theirs(number, BETWEEN[between])
    if between != "no list":
        least = (10 if keeps_best else 18), 6
        assert [recordings(one).replays >= count for one, count in zip(captured, least, strict=True)] == [True, True]


def _bodies(kept: dict[str, Any]) -> list[Callable[[Tensor], Any]]:
    def after_an_append(x: Tensor) -> Any:
        kept["seen"].append(1)
        return x * kept["log"][0]

    def deeper_after_an_append(x: Tensor) -> Any:
        kept["seen"].append(1)
        return x * (kept["deep"]["log"][0] + kept["log"][0])

    return [
        after_an_append, deeper_after_an_append, lambda x: x * kept["other"] * kept["log"][0],
        lambda x: x * kept.get("other", 0.0) * kept.get("log", {})[0],
        lambda x: x * kept["other"] * kept.get("deep", {}).get("log", {})[0],
        lambda x: x * kept["other"] * sum(one for one in kept["log"]),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_looked_at_below_a_constant_key(number: int, in_place: bool) -> None:
    kept: dict[str, Any] = {"other": 2.0, "log": [3.0], "seen": [], "deep": {"log": [5.0]}}
    body, x = _bodies(kept)[number], torch.ones(2, device=DEVICE)
    function = capture(body)
    for call in range(14):
        if call in (4, 8) and in_place:
            kept["log"][0], kept["deep"]["log"][0] = float(call), call * 2.0
        elif call in (4, 8):
            kept["log"], kept["deep"] = [float(call)], {"log": [call * 2.0]}
        assert torch.equal(function(x), body(x))
    assert len(kept["seen"]) == (28 if number < 2 else 0)
    assert recordings(function).replays >= 6


def _note_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have recording runs note no code, as those that only capture."""
    record, init, is_recording = CpuBackend.record, TapeRecorder.__init__, [False]

    def begin(self: TapeRecorder, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if is_recording[-1]:
            monkeypatch.setattr(self, "notes_code", False, raising=False)

    def recorded(*args: Any, **options: Any) -> Any:
        is_recording.append(True)
        try:
            return record(*args, **options)
        finally:
            is_recording.pop()

    monkeypatch.setattr(TapeRecorder, "__init__", begin)
    monkeypatch.setattr(CpuBackend, "record", recorded)
    monkeypatch.setattr(CpuBackend, "executes_recording_runs", False)


@pytest.mark.parametrize("name", [name for name, (_, is_keyed) in READS.items() if is_keyed])
def test_recordings_that_note_no_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _note_no_code(monkeypatch)
    program, x = Program(READS[name][0]), torch.ones(2, device=DEVICE)
    function = capture(program.__call__)
    for number in range(10):
        program.registry.known[number] = float(number)
        assert torch.equal(function(x), program(x))
    now = recordings(function)
    assert now.recordings == 1, str(now)
    assert now.replays >= 6, str(now)


def test_a_logger_among_others_that_come() -> None:
    @capture
    def body(x: Tensor) -> Tensor:
        logging.getLogger("tests.keyed").debug("said by the body")
        return x * 2

    numbers, x = itertools.count(), torch.ones(2, device=DEVICE)
    for _ in range(12):
        logging.getLogger(f"tests.keyed.other{next(numbers)}").isEnabledFor(logging.DEBUG)
        body(x)
    # one watched run makes the logger; only the next one can tell that its table is looked up by key alone
    assert recordings(body).replays >= (9 if EXECUTES else 8)
