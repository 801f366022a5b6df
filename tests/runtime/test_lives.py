"""Objects that come and go: what it costs to watch them is added up over all that have the same captured code."""

from __future__ import annotations

import gc
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import CaptureWarning, UncapturableError, capture, config, recordings, reset
from capture.core import events
from capture.core.events import Counters
from capture.runtime import lives
from capture.runtime.budget import Budget, most_efforts
from capture.runtime.lives import Lives, lives_of
from tests.support.decorated import bits
from tests.support.decorated import fresh as fresh

MANY = 60  # objects, one after another
MOST = most_efforts(5)
X = torch.arange(12.0).view(3, 4)


class Scaled:
    """An object with a captured method."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = torch.tensor(factor)

    @capture
    def of(self, x: Tensor) -> Tensor:
        return torch.relu(x - 3) * self.factor


class Net(nn.Module):
    """A module of which each instance is captured by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Strict(Scaled):
    """An object whose captured method has ``fallback="error"``."""

    @override
    @capture(fallback="error")
    def of(self, x: Tensor) -> Tensor:
        return torch.relu(x - 3) * self.factor


def captured_anew(number: int) -> Callable[[Tensor], Tensor]:
    @capture
    def shifted(x: Tensor) -> Tensor:
        return x + number

    return shifted


def a_module(number: int) -> Callable[[Tensor], Tensor]:
    del number
    module = capture(Net())
    eager = Net.forward.__get__(module)

    def called(x: Tensor) -> Tensor:
        result: Tensor = module(x)
        assert bits(result) == bits(eager(x))
        return result

    called.counted = module  # type: ignore[attr-defined]
    return called


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    """Turn on what the suite turns off (``CAPTURE_DROP_SLOW=0``), as its tests make and drop very many objects."""
    lives.forget()
    with config.patch(drop_slow=True):
        yield
    lives.forget()


MADE: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
    "method": lambda number: Scaled(float(number)).of,
    "module": a_module,
    "function": captured_anew,
}


class Counted:
    """Counts watched and recorded runs of all objects together."""

    def __init__(self, efforts: list[int], at: int) -> None:
        self.efforts, self.at = efforts, at

    def __call__(self, _: events.Log, event: events.Event) -> None:
        self.efforts[self.at] += event.kind in ("observe", "record")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("kind", MADE)
def test_objects_that_come_and_go_are_not_watched_for_ever(kind: str, calls: int) -> None:
    """All results are eager's, few of the objects are watched, and one finding says that they are new."""
    efforts: list[int] = [0] * MANY
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for number in range(MANY):
            function = MADE[kind](number)
            with events.listening(Counted(efforts, number)):
                for _ in range(calls):
                    result = function(X)
            if kind == "method":
                assert bits(result) == bits(torch.relu(X - 3) * torch.tensor(float(number)))
            elif kind == "function":
                assert bits(result) == bits(X + number)
            del function
    assert sum(efforts[int(MOST) + 2 :]) <= 6, efforts  # after each rest one may be watched and recorded
    texts = [str(warning.message) for warning in shown if issubclass(warning.category, CaptureWarning)]
    assert len(texts) == 1, texts
    assert texts[0].startswith("CG906")
    names = {"method": "a new Scaled object", "module": "a new Net object", "function": "captured anew"}
    assert names[kind] in texts[0]


def test_counters_add_up_to_the_calls() -> None:
    kept = Scaled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(MANY):
            Scaled(float(number)).of(X)
    before = recordings(Scaled.of)  # of those that nobody looked at: objects that are gone are not counted
    for _ in range(5):
        kept.of(X)
    after = recordings(Scaled.of)
    assert after.body_runs + after.replays == before.body_runs + before.replays + 5


def test_what_lives_on_is_recorded_all_the_same() -> None:
    """Once many came and went, an object that stays is looked at again, and replayed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(MANY):
            Scaled(float(number)).of(X)
        kept = Scaled(7.0)
        expected = bits(torch.relu(X - 3) * 7.0)
        for calls in range(3000):
            assert bits(kept.of(X)) == expected
            if calls % 100 == 0 and recordings(kept.of).replays:
                break
    assert recordings(kept.of).replays, recordings(kept.of)


def many_functions() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(MANY):
            captured_anew(number)(X)


def test_a_function_that_lives_on_is_recorded_all_the_same() -> None:
    """Its state is made when it is looked at, and knows of the calls before that."""
    many_functions()
    kept, calls = captured_anew(7), 3000
    with config.patch(drop_slow=False):
        for _ in range(calls):
            assert bits(kept(X)) == bits(X + 7)
    made = recordings(kept)
    assert made.replays, made
    assert made.body_runs + made.replays == calls


def test_one_that_was_never_called_can_be_asked_for() -> None:
    many_functions()
    kept = captured_anew(7)
    assert recordings(kept).body_runs == 0
    assert bits(kept(X)) == bits(X + 7)


def test_to_capture_anew_costs_little_once_the_code_gave_up() -> None:
    """Once signature, names and a state were made each time, by calls of some 300 Python functions."""
    many_functions()
    ran: list[str] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.append(frame.f_code.co_qualname)

    gc.disable()  # what callbacks of the collector run does not count
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        captured_anew(7)(X)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert len(ran) <= 60, ran


def test_objects_that_are_alive_are_watched_each() -> None:
    many = [Scaled(float(number)) for number in range(30)]
    for _ in range(4):
        for number, scaled in enumerate(many):
            assert bits(scaled.of(X)) == bits(torch.relu(X - 3) * float(number))
    assert all(recordings(scaled.of).recordings == 1 for scaled in many)


def test_an_error_that_is_asked_for_stays_one() -> None:
    """A function that is to be recorded says that it is not."""

    def one_after_another() -> None:
        for number in range(MANY):
            Strict(float(number)).of(X)

    with pytest.raises(UncapturableError, match="a new Strict object after few calls"):
        one_after_another()


def budget(calls: int, replays: int, *, ms: float = 10.0) -> Budget:
    """The budget of a state that was watched and recorded once and then called so often; a call takes 1 ms."""
    made = Budget(Counters(), MOST)
    made.spend("observations", ms)
    made.spend("recordings", ms / 4)
    made.ran_eagerly(1.0)
    made.counters.body_runs, made.counters.replays = calls - replays, replays
    return made


def test_what_pays_for_itself_leaves_no_debt() -> None:
    left = Lives()
    for _ in range(MANY):
        left.end(budget(102, 100))
    assert (left.debt, left.gave_up) == (0.0, False)
    for _ in range(MANY):
        left.end(budget(3, 1))
    assert left.gave_up
    left.is_told = True
    assert [left.passes() for _ in range(18)] == [False, *[True] * 16, False]
    for _ in range(MANY):
        left.end(budget(2002, 2000))
    assert [left.debt, left.passes()] == [0.0, False]


def test_what_nobody_called_counts_for_nothing() -> None:
    left = Lives()
    for _ in range(MANY):
        left.end(Budget(Counters(), MOST))
    assert left.debt == 0


def test_a_new_state_begins_with_the_debt_of_those_before() -> None:
    left = Lives()
    for _ in range(2):
        left.end(budget(1, 0))
    new = Budget(Counters(), MOST)
    left.begin(new)
    assert new.debt == left.debt == 2.5
    left.end(new)  # which was not called, and owes nothing of its own
    assert left.debt == 2.5


def test_code_shares_and_functions_of_c_do_not() -> None:
    codes = [inspect.unwrap(captured_anew(number)).__code__ for number in range(2)]
    assert lives_of(codes[0]) is lives_of(codes[1])
    assert lives_of(None) is not lives_of(None)


def test_reset_begins_anew() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(MANY):
            Scaled(float(number)).of(X)
    reset(Scaled.of)
    scaled = Scaled()
    for _ in range(3):
        scaled.of(X)
    assert recordings(scaled.of).recordings == 1


def test_nothing_is_added_up_where_times_decide_nothing() -> None:
    with config.patch(drop_slow=False):
        for number in range(MANY // 2):
            scaled = Scaled(float(number))
            for _ in range(3):
                scaled.of(X)
            assert recordings(scaled.of).replays == 1
