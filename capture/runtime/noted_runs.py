"""Runs with noted numbers, which are undone: numbers in Python state are put into their places for a run, and what the
body adds to them is told from what else it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from capture.core.interrupts import guarded
from capture.engines.base import Number
from capture.observe.described import DescribedRun
from capture.observe.run import ObservedRun
from capture.runtime import planning
from capture.runtime.captured import Captured
from capture.runtime.noted_numbers import Formula, Noted, Noting
from capture.state.amounts import Amounts, either, position_of
from capture.state.call import Call
from capture.state.snapshot import Change

Result = TypeVar("Result")


def holding(call: Call, given: Mapping[int, Number], run: Callable[[], Result]) -> Result:
    """Run something that is undone while the places of a call hold its numbers, so that what the body changes there
    shows as a change of them. ``given``: plain ones, by position, where the call has noted ones."""
    places = call.binder.places
    theirs = [(place, place.read_in(call.values)) for place in places]

    def put_back(_: Sequence[BaseException] = ()) -> None:
        for place, value in theirs:
            place.write_in(call.values, value)

    def held() -> Result:
        for place, at in zip(places, range(len(call.values) - len(places), len(call.values)), strict=True):
            place.write_in(call.values, given.get(at, call.values[at]))
        found = run()
        put_back()
        return found

    return guarded(held, (), put_back)


def watched_with(captured: Captured, call: Call, given: Mapping[int, Number]) -> tuple[ObservedRun, DescribedRun]:
    """Watch a run and undo it (see ``holding``)."""
    return holding(call, given, lambda: planning.watch_undone(captured, call, counts=False))


def noted_amounts(
    call: Call, noting: Noting, numbers: Sequence[Number], positions: Sequence[int], found: dict[int, int]
) -> Amounts | None:
    """As ``Call.amounts``, for a run with noted numbers, by their formulas. ``found`` gets all amounts."""
    places = call.binder.places
    first = len(call.values) - len(places)

    def amount(change: Change) -> int | None:
        at, left = position_of(places, first, change), change.after
        if at is None or at not in positions or not isinstance(left, Noted) or left.noting is not noting:
            return None
        number = positions.index(at)
        formula, own = left.formula, numbers[number]
        if type(own) is not int or not _adds_to(formula, number):
            return None
        found[at] = int(formula.value(numbers)) - own
        return found[at]

    return either(amount, call.amounts)


def _adds_to(formula: Formula, number: int) -> bool:
    """Whether the formula is this number of the call, with whole numbers added or taken away."""
    if not formula.operation:
        return bool(formula.operands[0] == number)
    if formula.operation not in ("add", "sub"):
        return False
    left, right = formula.operands
    if type(left) is Formula:
        return type(right) is int and _adds_to(left, number)
    return formula.operation == "add" and type(left) is int and type(right) is Formula and _adds_to(right, number)
