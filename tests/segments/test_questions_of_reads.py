"""What a body asks of numbers that it read makes branches by the answers: one recording for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capture import capture, config, recordings
from capture.engines.base import Found, found
from capture.observe.returned_value import ASKED, TAKEN
from capture.runtime.entry import Entry
from tests.segments.bodies import Program, draw
from tests.segments.test_bodies import CALLS, compared, fresh
from tests.support.device import EXECUTES
from tests.support.observed import bits
from tests.support.unseen import Notes

__all__ = ["fresh"]
Kept = Callable[[], Program]


@pytest.fixture(autouse=True)
def _every_body_pays() -> Iterator[None]:
    with config.patch(drop_slow=False):
        yield


def kept(body: Callable[..., Any], state: Any) -> Program:
    return body, lambda number: (draw(number),), state


def compared_with_another() -> Program:
    state = {"sum": 0.0, "large": 0.0}

    def body(x: Tensor) -> Tensor:
        loss = x.mean().item()
        state["sum"] = state["sum"] * 0.5 + loss
        if loss > 0.1:
            state["large"] = loss * 2
            return x * 3
        return x * 2

    return kept(body, state)


def best() -> Program:
    state = {"best": -1.0}

    def body(x: Tensor) -> Tensor:
        state["best"] = max(state["best"], x.mean().item())
        return x * 2

    return kept(body, state)


def finite() -> Program:
    """As a training script stops at a loss that is none. Here it goes on with the next call."""
    state = {"loss": 0.0, "stopped": 0}

    def body(x: Tensor, factor: Tensor) -> Tensor:
        loss = (x.sum() * factor).item()
        x.mul_(2)
        if not math.isfinite(loss):
            state["stopped"] += 1
            raise ValueError(f"the loss is {loss}")
        state["loss"] = state["loss"] * 0.5 + loss
        return x * 2

    def arguments(number: int) -> tuple[Tensor, Tensor]:
        return draw(number), torch.tensor(math.inf if number in (16, 22) else 1.0)

    return body, arguments, state


def several_questions() -> Program:
    """Which ones are asked follows from the answers to others, and from a number in Python state."""
    state = {"best": -0.1, "worse": 0.0, "ema": 0.0}

    def body(x: Tensor) -> Any:
        loss, hits = x.mean().item(), (x > 0).sum().item()
        state["ema"] = 0.5 * state["ema"] + loss
        if loss > state["best"]:
            state["best"] = loss
            x = x * 3
        elif hits > 3:
            state["worse"] = loss
            x = x + 1
        return x, loss * hits

    return kept(body, state)


def clipped() -> Program:
    def body(x: Tensor) -> Any:
        return min(max(x.sum().item(), -1.0), 1.0), x * 2

    return kept(body, None)


def ways() -> Program:
    state = {"sum": 0.0}

    def body(x: Tensor) -> Any:
        loss, hits = x.mean().item(), (x > 0).sum().item()
        state["sum"] = state["sum"] * 0.5 + loss
        if loss > 0.1:
            return x * 3, loss * hits
        return (x + 1, -loss) if hits > 3 else (x * 2, state["sum"])

    return kept(body, state)


@pytest.mark.parametrize("make", [best, finite, ways, clipped])
def test_a_decision_on_a_read_has_a_recording_for_each_answer(make: Kept) -> None:
    counters = recordings(compared(make))
    assert counters.replays >= CALLS // 2, str(counters)
    assert counters.recordings <= 8


def test_an_engine_may_know_of_reads_what_was_known_at_their_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of the recording run tells the answers."""

    def found_at_break(recorded: str, result: Any) -> Found:
        return found(TAKEN if recorded.startswith(ASKED) else recorded, result)

    monkeypatch.setattr("capture.engines.cpu.segments.found", found_at_break)
    counters = recordings(compared(ways))
    assert counters.replays >= CALLS // 2, str(counters)


def test_the_same_answers_to_other_questions_are_another_branch() -> None:
    """What is asked second depends on the first answer, so answers alone do not tell what the body does."""

    def body(x: Tensor) -> Tensor:
        first, second = x[0].item(), x[1].item()
        larger = first
        if second > first:
            larger = second
        return x * 3 if larger > 0.6 else x * 2

    captured = capture(body)
    low, second_low, second_high, first_high = (0.2, 0.1), (0.1, 0.2), (0.6, 0.7), (0.9, 0.1)
    for first, second in [low, second_low, low, low, second_low, low, second_high, low, second_high, first_high] * 3:
        x = torch.tensor([first, second])
        assert bits(captured(x)) == bits(body(x)), (first, second)
    assert recordings(captured).replays > 0


@pytest.mark.parametrize("make", [compared_with_another, several_questions])
def test_a_branch_that_leaves_more_in_python_state_is_as_in_eager_code(make: Kept) -> None:
    compared(make)


@pytest.mark.parametrize("asks", [False, True])
def test_a_body_that_calls_unknown_code_in_c_is_not_run_with_other_values(asks: bool) -> None:
    """What such code keeps cannot be undone, whether all calls come to it or some."""
    notes, state = Notes(), {"sum": 0.0}

    @capture
    def body(x: Tensor) -> Tensor:
        total = x.mean()
        loss = total.item()
        state["sum"] = state["sum"] * 0.5 + loss
        if asks and loss > 0.1:
            notes.add(total.tolist())
            return x * 3
        if not asks:
            notes.add(total.tolist())
        return x * 2

    values = [draw(number) for number in range(CALLS)]
    for x in values:
        body(x)
    totals = [x.mean().item() for x in values]
    expected = [str(total) for total in totals if total > 0.1 or not asks]
    assert {*notes.all()} == {*expected}
    assert notes.all() == expected or not EXECUTES  # a capture that came to nothing is followed by an eager run


class Numbers:
    """Numbers in Python state."""

    n: float = 0
    k: float = 0


def test_an_int_that_is_compared_with_a_float_is_asked() -> None:
    """``int`` leaves such a comparison to ``float``, which asks no method of ours."""
    state, theirs = Numbers(), Numbers()

    def body(x: Tensor, kept: Numbers) -> Tensor:
        loss = x.mean().item()
        kept.k = loss + sorted([2.25, kept.n])[0]
        kept.n += 1
        return x * 2

    captured = capture(lambda x: body(x, state))
    for number in range(CALLS):
        x = draw(number)
        assert bits(captured(x)) == bits(body(x, theirs))
        assert bits(vars(state)) == bits(vars(theirs)), number


@pytest.mark.parametrize("reads", [False, True])
def test_a_number_that_is_set_to_what_it_is_may_be_another_in_the_next_call(reads: bool) -> None:
    """A run that leaves it as it is does not show that the body sets it."""
    state, theirs = Numbers(), Numbers()

    def body(x: Tensor, kept: Numbers) -> Tensor:
        if reads:
            loss = x[0, 0].item()
            kept.n = min(loss, 0.0) // 0.5
        else:
            kept.n = 5 if kept.n > 3 else kept.n + 1
        return x * 2

    captured = capture(lambda x: body(x, state))
    given = [7, 8, 9, 7, 5, 5, 5, 5, 5, 7, 9, 5, 7, 7, 1, 2, 7]
    losses = [-0.3, 1.2, 1.0, -0.7, 0.1, -1.9, 0.6, 1.1, -0.1, -0.2, -0.4, 0.8, 1.6, 0.1, 0.1, -0.4, -0.2, 1.5, 0.2]
    for number, loss in enumerate(losses * 2):
        if not reads:
            state.n = theirs.n = given[number % len(given)]
        x = torch.full((2, 2), loss)
        assert bits(captured(x)) == bits(body(x, theirs))
        assert bits(vars(state)) == bits(vars(theirs)), number
    assert recordings(captured).replays > 0


def _never_executes(entry: Entry, *, executes: bool) -> bool:
    """As on an engine whose recording runs only capture, which watches bodies until they read something again."""
    del executes
    return not (entry.nodes or entry.has_read_again)


def test_branches_come_by_chance_where_recording_runs_only_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that formulas take count as ever new ones no more; the branch of each call is proven."""
    monkeypatch.setattr("capture.runtime.dispatch.is_read_once_more", _never_executes)
    captured = capture(clipped()[0])
    for number in range(CALLS):
        x = torch.tensor([(2.07, 1.55, -0.48, -1.45, 0.07, -0.57, 1.7, -1.18, -0.14)[number % 9], 0.001 * number])
        assert bits(captured(x)) == bits(clipped()[0](x)), number
    assert recordings(captured).replays >= CALLS // 2, str(recordings(captured))


def test_another_branch_that_begins_alike_where_recording_runs_only_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer does not tell which branch it is: what is known to begin so may be another one."""
    monkeypatch.setattr("capture.runtime.dispatch.is_read_once_more", _never_executes)
    test_the_same_answers_to_other_questions_are_another_branch()
