"""Numbers in Python state that the body makes others of in each call, and that operators get: the time of a simulation,
a rate that decays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, recordings
from tests.support.bucketed import assert_same
from tests.support.device import LIFTS
from tests.support.no_plans import no_plans as no_plans

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")  # where each value is another key
CALLS = 24


class State:
    """What the bodies keep."""

    def __init__(self) -> None:
        self.t, self.dt, self.n = 0.1, 0.013, 3
        self.other = 0.25
        self.known = {"t": 0.3}
        self.inner = SimpleNamespace(t=0.6)
        self.log: list[Any] = []
        self.text = ""
        self.seen: Any = None
        self.counter = itertools.count(3)

    def numbers(self) -> str:
        """All of them, bit for bit."""
        return repr([(name, value) for name, value in sorted(self.__dict__.items()) if name != "step"])


Body = Callable[[State, Tensor], Any]


def time_step(self: State, x: Tensor) -> Any:
    y = torch.sin(x + self.t)
    self.t += self.dt
    return y


def decay(self: State, x: Tensor) -> Any:
    self.t *= 0.99
    return x * math.exp(-self.t)


def corrections(self: State, x: Tensor) -> Any:
    self.t *= 0.9
    self.other *= 0.999
    return x / (1 - self.t) / (x * x / (1 - self.other)).sqrt()


def gain(self: State, x: Tensor) -> Any:
    variance = self.t + 0.01
    share = variance / (variance + 0.3)
    self.t = (1 - share) * variance
    return x + share * (x.mean() - x)


def exchange(self: State, x: Tensor) -> Any:
    self.t, self.other = self.other * 1.01 + 0.3, self.t * 0.99
    return x * self.t + self.other


def of_a_count(self: State, x: Tensor) -> Any:
    self.n += 1
    self.t = self.n / 7
    return x * self.t


def in_a_dict(self: State, x: Tensor) -> Any:
    self.known["t"] *= 0.97
    return x * self.known["t"]


def in_an_object(self: State, x: Tensor) -> Any:
    self.inner.t *= 0.97
    return x * self.inner.t


def copied(self: State, x: Tensor) -> Any:
    self.seen = (self.t, self.t * 2)
    self.t += 0.5
    return x * self.t


def returned(self: State, x: Tensor) -> Any:
    self.t += 0.1
    return {"y": x * self.t, "t": self.t, "both": [self.t, -self.t]}


def appended(self: State, x: Tensor) -> Any:
    self.t += 0.5
    self.log.append(self.t)
    return x * self.t


def as_index(self: State, x: Tensor) -> Any:
    self.t += 0.3
    return x[int(self.t) % 4] * 2


def as_key(self: State, x: Tensor) -> Any:
    self.t += 0.3
    self.known[self.t] = 1  # type: ignore[index]
    return x * self.t


def as_text(self: State, x: Tensor) -> Any:
    self.t += 0.3
    self.text = f"{self.t:.3f}"
    return x * self.t


def as_digits(self: State, x: Tensor) -> Any:
    self.t += 0.3
    self.text = self.t.hex()
    return x * self.t


def compared(self: State, x: Tensor) -> Any:
    self.t += 0.5
    if self.t > 3:
        self.t = 0.1
    return x * self.t


def limited(self: State, x: Tensor) -> Any:
    self.t = min(self.t * 1.3, 2.3)
    return x * self.t


def asked_for_its_class(self: State, x: Tensor) -> Any:
    self.t += 0.3
    return x * self.t if type(self.t) is float else x * 7


def from_a_counter(self: State, x: Tensor) -> Any:
    self.t = self.t + next(self.counter) * 0.1
    return x * self.t


def raising(self: State, x: Tensor) -> Any:
    self.t = self.t**1.9 + 1.5
    return x * self.t


def caught(self: State, x: Tensor) -> Any:
    self.t *= 3.0
    try:
        factor = math.exp(self.t)
    except OverflowError:
        factor, self.t = 3.0, 0.2
    return x * factor


FOLLOWING: list[Body] = [
    time_step, decay, corrections, gain, exchange, of_a_count, in_a_dict, in_an_object, copied, returned, appended,
]  # fmt: skip
OTHERS: list[Body] = [
    as_index, as_key, as_text, as_digits, compared, limited, asked_for_its_class, from_a_counter, raising, caught,
]  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - which one is compared
        return f"{type(error).__name__}: {error}"


def twins(body: Body, between: Callable[[State, int], None] = lambda state, call: None, calls: int = CALLS) -> int:
    """Compare the body with its twin in eager, call by call. Gives the number of replays."""

    class Captured(State):
        @capture
        def step(self, x: Tensor) -> Any:
            return body(self, x)

    eager, ours = State(), Captured()
    for call in range(calls):
        between(eager, call)
        between(ours, call)
        x = torch.randn(4, 3)
        expected, got = outcome(lambda x=x: body(eager, x)), outcome(lambda x=x: ours.step(x))  # type: ignore[misc]
        assert repr(got) == repr(expected)
        if isinstance(got, (dict, Tensor)):
            assert_same(*[one["y"] if isinstance(one, dict) else one for one in (got, expected)])
        assert ours.numbers() == eager.numbers()
    return recordings(ours.step).replays


@pytest.mark.parametrize("body", FOLLOWING, ids=lambda body: body.__name__)
def test_recordings_go_on_with_what_follows_from_a_number(body: Body) -> None:
    assert twins(body) > CALLS - 6 or not LIFTS


@pytest.mark.parametrize("body", OTHERS, ids=lambda body: body.__name__)
def test_other_uses_of_a_number_are_noticed(body: Body) -> None:
    twins(body)


def other_steps(state: State, call: int) -> None:
    """The body adds something else from then on."""
    if call in (9, 15):
        state.dt *= 2


def other_times(state: State, call: int) -> None:
    """The caller sets the number, also to those for which there are kernels of their own."""
    if call % 5 == 4:
        state.t = [0.1, 0.0, 1.0, -0.0, math.inf, math.nan, -2.0][call // 5 % 7]


def other_types(state: State, call: int) -> None:
    """The caller puts something else there."""
    values: dict[int, Any] = {8: 3, 12: torch.tensor(0.5), 16: 0.7, 20: "text", 22: 0.7}
    state.t = values.get(call, state.t)


def other_dicts(state: State, call: int) -> None:
    """Another dict holds the number."""
    if call in (8, 14):
        state.known = {"t": 0.9} if call == 8 else dict(state.known)


def other_objects(state: State, call: int) -> None:
    """Another object holds the number."""
    if call in (8, 14):
        state.inner = SimpleNamespace(t=0.9 if call == 8 else state.inner.t)


@pytest.mark.parametrize(
    ("body", "between"),
    [
        (time_step, other_steps), (time_step, other_times), (time_step, other_types), (in_a_dict, other_dicts),
        (in_an_object, other_objects),
    ],
)  # fmt: skip
def test_what_the_caller_changes_between_calls(body: Body, between: Callable[[State, int], None]) -> None:
    assert twins(body, between, 40) > 4 or not LIFTS


def test_a_number_in_a_closure() -> None:
    def make(wrap: Callable[[Any], Any]) -> tuple[Any, Callable[[], float]]:
        now = 0.1

        def step(x: Tensor) -> Tensor:
            nonlocal now
            now += 0.01
            return torch.sin(x + now)

        return wrap(step), lambda: now

    (eager, eager_now), (ours, our_now) = make(lambda step: step), make(capture)
    for _ in range(CALLS):
        x = torch.randn(4, 3)
        assert_same(ours(x), eager(x))
        assert our_now().hex() == eager_now().hex()
    assert recordings(ours).replays > CALLS - 6 or not LIFTS


def set_back(self: State, x: Tensor) -> Tensor:
    self.t += 0.5
    return x * self.t


@pytest.mark.parametrize("body", [set_back, of_a_count, appended], ids=lambda body: body.__name__)
def test_a_captured_function_that_is_put_into_a_class(body: Body) -> None:
    """Its parameter ``self`` is an argument like any other."""

    class Theirs(State):
        step: Any = None

    Theirs.step = capture(body)
    all_states = [(State(), Theirs()), (State(), Theirs())]
    for call in range(CALLS):
        pair = eager, ours = all_states[call > 15 and call % 2]
        for state in pair if call in (6, 11) else ():
            state.t = 0.1  # to an earlier value
        x = torch.randn(4, 3)
        assert_same(ours.step(x), body(eager, x))
        assert ours.numbers() == eager.numbers()
