"""Bodies that raise after a value which they read: in some calls, which eager refuses, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor

from capture import capture, config, recordings
from capture.engines.cpu.segments import SegmentedTape
from tests.support.device import EXECUTES
from tests.support.observed import bits, fresh, x_of

__all__ = ["fresh"]

pytestmark = pytest.mark.filterwarnings("ignore::capture.CaptureWarning")

CALLS = 30


class Refused(Exception):
    pass


def reads_an_element(w: Tensor, x: Tensor) -> Tensor:
    w.mul_(0.9)
    if x[0, 0].item() < 0:
        raise Refused("an element")
    return x * w.sum()


def reads_before_it_writes(w: Tensor, x: Tensor) -> Tensor:
    least = x.min().item()
    if least < -1:
        raise Refused(f"{least:.3f}")
    return w.add_(1).sum() + x


def returns_what_it_reads(w: Tensor, x: Tensor) -> Any:
    w.mul_(0.9)
    total = x.sum().item()
    if total < 0:
        raise Refused("a sum")
    return x + w, total / 2


def counts(w: Tensor, x: Tensor, calls: list[int]) -> Any:
    calls[0] += 1
    w.mul_(0.9)
    if x.sum().item() * calls[0] < -20:
        raise Refused(str(calls[0]))
    return x * w


def asks_a_truth(w: Tensor, x: Tensor) -> Tensor:
    w.mul_(0.9)
    if not torch.isfinite(x).all():
        raise Refused("not finite")
    if x.sum().item() > 5:
        x = x / 2
    return x * w.sum()


def first(number: int) -> bool:
    return number < 4


def second(number: int) -> bool:
    return number == 1


def third(number: int) -> bool:
    return number == 2


def some(number: int) -> bool:
    return number % 5 in (2, 4)


def most(number: int) -> bool:
    return number % 7 != 3


def given(number: int, *, refused: bool) -> Tensor:
    x = x_of(number, 2, 3).abs()
    return torch.where(x == x.max(), float("inf"), -x - 2) if refused else x


def run(body: Callable[..., Any], refused: Callable[[int], bool], **options: Any) -> tuple[list[Any], Any]:
    weights, calls = torch.ones(3), [0]
    arguments = (weights, calls)

    def program(x: Tensor) -> Any:
        return body(weights, x, calls) if body is counts else body(arguments[0], x)

    called = capture(program, **options) if options else program
    seen = list[Any]()
    for number in range(CALLS):
        try:
            result = bits(called(given(number, refused=refused(number))))
        except Refused as error:
            result = str(error)
        seen.append((result, bits(weights), calls[0]))
    return seen, called


@pytest.mark.one_in(3)
@pytest.mark.parametrize("verify", ["off", "first", "always"])
@pytest.mark.parametrize("refused", [first, second, third, some, most])
@pytest.mark.parametrize(
    "body", [reads_an_element, reads_before_it_writes, returns_what_it_reads, counts, asks_a_truth]
)
def test_refused_calls(body: Callable[..., Any], refused: Callable[[int], bool], verify: str) -> None:
    expected, _ = run(body, refused)
    with config.patch(drop_slow=False):
        seen, called = run(body, refused, verify=verify)
    assert seen == expected
    if body is not counts and refused is not most and verify == "off" and EXECUTES:
        assert recordings(called).replays >= 12, recordings(called)


@define(eq=False, slots=False)
class _State:
    w: Tensor = field(factory=lambda: torch.ones(4))
    table: Tensor = field(factory=lambda: torch.arange(32.0).view(8, 4))
    average: float = 0.0


def _refuses_an_index(state: _State, x: Tensor) -> Tensor:
    """The table has no row for what is refused."""
    state.w.mul_(0.9)
    if x.max().item() > 1.2:
        raise Refused("large")
    state.w.add_(1)
    y = state.table[(x.max().ceil().long() * 4).view(1)] * 2
    state.average = 0.9 * state.average + y.sum().item()
    return y


def _has_no_index(state: _State, x: Tensor) -> Any:
    state.w.mul_(0.9)
    largest = x.max().item()
    if largest > 1.2:
        return -x
    state.w.add_(torch.randn(4))
    y = state.table[(x.max().ceil().long() * 4).view(1)] * 2
    state.average = 0.9 * state.average + y.sum().item()
    return y, largest


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("body", [_refuses_an_index, _has_no_index])
def test_operators_that_raise_behind_the_end(body: Callable[..., Any], verify: str) -> None:
    """A replay learns after its last read of numbers that the body had ended before: another operator between the two
    raises an error, which is none of the body's."""

    def outcomes(**options: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        state = _State()

        def program(x: Tensor) -> Any:
            return body(state, x)

        called: Any = capture(program, **options) if options else program
        seen = list[Any]()
        for number in range(24):
            x = x_of(number, 2, 3).clamp(-1, 1) * (1.9 if number > 8 and number % 4 == 0 else 0.5)
            try:
                result = bits(called(x))
            except (Refused, IndexError) as error:
                result = type(error), str(error)[:20], error.__context__
            seen.append((result, bits(state.w), state.average, bits(torch.get_rng_state())))
        return seen, called

    expected, _ = outcomes()
    seen, called = outcomes(verify=verify)
    assert seen == expected
    if EXECUTES:
        assert recordings(called).replays >= 12, recordings(called)


@pytest.mark.skipif(not EXECUTES, reason="of the tape")
def test_segments_behind_the_end_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device an operator that is asked for what it cannot do ends all work there: a way that the body has left
    ends at the first read that tells."""
    state, ran, segment = _State(), list[int](), SegmentedTape.segment

    def noted(self: SegmentedTape, number: int) -> Any:
        ran.append(number)
        return segment(self, number)

    def body(x: Tensor) -> Any:
        largest = x.max().item()
        if largest > 1.2:
            return -x
        y = x * 2 + state.w[:3]
        state.average = 0.9 * state.average + y.sum().item()
        return y, largest

    monkeypatch.setattr(SegmentedTape, "segment", noted)
    called = capture(body)
    for number in range(60):
        is_large = number % 9 == 8
        x = x_of(number, 2, 3).clamp(-1, 1)
        x[0, 0] = 1.9 if is_large else 1.1
        ran.clear()
        called(x)
        if number == 8:
            assert ran == [0]
        if number > 40:
            assert ran == ([0, 1] if is_large else [0, 1, 2])
    assert recordings(called).replays >= 50, recordings(called)
