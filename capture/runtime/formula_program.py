"""Formulas of one recording as a program: each is computed once a replay, as soon as all that it is made of was read.

A body that reads a count and corrects by it has many formulas, and a replay needs them between two operators. To walk
through the formulas themselves takes longer than the operators: each is computed for what the body asks, again for the
operators that get it, and again for what is left. Here all have a slot in one list, and what computes them is in the
order of the reads. Where anything is not as in the recorded run (an answer, an error, a number that operators may not
get), the program stops, and the replay goes on in the general way (``branches``), which finds out what comes then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field

from capture.core.data import define, frozen
from capture.observe.computed import Computed, same
from capture.observe.returned_value import RETURNED
from capture.runtime.noted_numbers import ASKING, Formula, function_of, may_be_given
from capture.tree.node import Node

_ERRORS = (ArithmeticError, ValueError, TypeError)

Step = tuple[Callable[..., Any], int, tuple[int, ...]]
"""What computes, and the slots of its result and of its operands."""

BEFORE_READS = -1
"""In the place of the number of a read: what follows from the numbers of the call is there from the beginning."""


@frozen
class _Put:
    """A number that operators get. ``at``: its position in ``LiftedNumbers.used``."""

    at: int
    slot: int
    is_power: bool
    alike: tuple[int, ...]
    """Slots of others that were equal in both recordings, as far as they are known by then."""


@define
class _AtRead:
    """What is done after a read. ``slot``: that of its value."""

    slot: int
    steps: list[Step] = field(factory=list)
    answers: list[tuple[int, Any]] = field(factory=list)
    """Slots of what the body asks, with the answers of the recorded run."""
    puts: list[_Put] = field(factory=list)


@frozen(eq=False)
class FormulaProgram:
    """The program of one recording. One list of slots belongs to one replay."""

    template: list[Any]
    call: list[tuple[int, int]]
    """Slots of numbers of the call, with their positions among its values."""
    reads: list[_AtRead]
    slot_of: Mapping[Formula, int]
    """Where what the body leaves of the numbers is."""
    put_one: Callable[[int, Any], None] | None

    def begin(self, values: Sequence[Any]) -> list[Any]:
        """The slots of a call with these values, before the first read."""
        slots = [*self.template]
        for slot, position in self.call:
            slots[slot] = values[position]
        return slots

    def after(self, number: int, value: Any, slots: list[Any]) -> bool:
        """Go on after a read: compute, compare answers, and give operators their numbers. False where the body goes
        another way than in the recorded run, or operators may do otherwise for a number (``GivenNumbers.put``)."""
        at = self.reads[number]
        slots[at.slot] = value
        try:
            for function, result, operands in at.steps:
                slots[result] = function(*[slots[operand] for operand in operands])
        except _ERRORS:
            return False
        for slot, answer in at.answers:
            found = slots[slot]
            if type(found) is not type(answer) or found != answer:
                return False
        for put in at.puts:
            value = slots[put.slot]
            if not may_be_given(value, is_power=put.is_power):
                return False
            if put.alike and not all(same(slots[other], value) for other in put.alike):
                return False
            assert self.put_one is not None
            self.put_one(put.at, value)
        return True

    def left(self, formulas: Sequence[Any], slots: list[Any]) -> dict[Any, Any] | None:
        """What the body leaves of the numbers, after the last read. None where the program has not all of that."""
        try:
            return {formula: slots[self.slot_of[formula]] for formula in formulas}
        except KeyError:
            return None


@define
class _Builder:
    """Slots that were given so far."""

    positions: tuple[int, ...]
    reads: list[_AtRead]
    template: list[Any] = field(factory=list)
    call: list[tuple[int, int]] = field(factory=list)
    known: dict[Any, tuple[int, int]] = field(factory=dict)
    """Slot, and the number of the last read that it follows from, by what is there."""

    def slot(self, key: Any, last: int, value: Any = None) -> tuple[int, int]:
        self.template.append(value)
        self.known[key] = len(self.template) - 1, last
        return self.known[key]

    def of(self, operand: Any) -> tuple[int, int]:
        """Slot and last read of a formula or a constant. Raises ``KeyError`` for what follows from later reads."""
        if type(operand) is not Formula:
            key: Any = "constant", type(operand), repr(operand)
            return self.known.get(key) or self.slot(key, -1, operand)
        if not operand.operation:
            return self._variable(operand.operands[0])
        if operand not in self.known:
            self.known[operand] = self.step(operand.operation, function_of(operand.operation), operand.operands)
        return self.known[operand]

    def _variable(self, variable: Any) -> tuple[int, int]:
        if variable in self.known or isinstance(variable, tuple):
            return self.known[variable]
        found = self.slot(variable, -1)
        self.call.append((found[0], self.positions[variable]))
        return found

    def step(
        self, name: str, function: Callable[..., Any], operands: Sequence[Any], *, at_least: int = 0
    ) -> tuple[int, int]:  # fmt: skip
        """What computes this, once. ``at_least``: the read after which it may be asked."""
        found = [self.of(operand) for operand in operands]
        slots = tuple([slot for slot, _ in found])
        key = name, slots
        if key not in self.known:
            last = max([at_least, *[last for _, last in found]])
            slot, _ = self.slot(key, last)
            self.reads[last].steps.append((function, slot, slots))
        return self.known[key]


def program_of(node: Node) -> FormulaProgram | None:
    """The program of a recording, for its reads up to the first one whose value is compared, or that is an island."""
    computed: Computed | None = node.computed
    count = next((at for at, text in enumerate(node.reads) if not text.startswith(RETURNED)), len(node.reads))
    if computed is None or not count:
        return None
    reads: list[_AtRead] = []
    made = _Builder(computed.positions, reads)
    for number in range(count):
        slot, _ = made.slot(("read", number), number)
        reads.append(_AtRead(slot))
    if not _asks(made, computed):
        return None
    given, outputs = node.given, node.outputs
    for number, several in {} if given is None else given.ready.items():
        if 0 <= number < count:  # those of the call are there before
            reads[number].puts.extend(_put_of(made, given, at, number) for at in several)
    leaves = [] if outputs is None else [which for _, which in outputs.reads if isinstance(which, Formula)]
    slot_of = {}
    for leaf in leaves:
        if _last(leaf) < count:
            slot_of[leaf] = made.of(leaf)[0]
    put_one = None if given is None else given.places.put_one
    return FormulaProgram(made.template, made.call, reads, slot_of, put_one)


def _last(formula: Formula) -> int:
    return max((one[1] for one in formula.origins() if isinstance(one, tuple)), default=-1)


def _asks(made: _Builder, computed: Computed) -> bool:
    """Have the program ask what the body asks. False where that raises an error, and so computes nothing."""
    known: Any = computed.asked
    for (question, answer), last in zip(known, computed.last_needed, strict=True):
        if last >= len(made.reads):
            continue
        if question.operation != "raises":
            slot, at = made.step(
                question.operation, ASKING[question.operation], question.operands, at_least=max(last, 0)
            )
            made.reads[at].answers.append((slot, answer))
        elif answer:
            return False
        else:
            made.of(question.operands[0])  # that is computed, so nothing was raised
    return True


def _put_of(made: _Builder, given: Any, at: int, number: int) -> _Put:
    others = [given.formulas[other] for other in given.alike.get(at, ()) if other != at]
    known = tuple([made.of(other)[0] for other in others if _last(other) <= number])
    return _Put(at, made.of(given.formulas[at])[0], at in given.places.powers, known)
