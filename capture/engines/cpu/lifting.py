"""Numbers on a tape that differ from call to call.

Two runs of a body with different values of a number give two tapes. If the tapes differ only in arguments of operators
that are, in both, the number itself or what Python's arithmetic is known to make of it, the tape may run with any
value: it becomes a register. What was computed in another way would differ otherwise, and a decision of the host would
give other operators.

Only arguments that are numbers by an operator's schema are given another one: of a range, the size depends on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.engines.base import Number, NumbersToLift
from capture.engines.cpu.tape import Leaf, Register, Tape, TapeMemory, TapeStep
from capture.key.tensor_meta import bytes_of
from capture.observe.operator_schema import number_arguments

Numbers = Sequence[tuple[Number, Number]]
"""For each number its values in the two runs."""


class _OtherTapeError(Exception):
    """The tapes differ in more than these numbers."""


@define(eq=False)
class _Comparison:
    """``places``: by ``id`` of a step, the positions of numbers in its arguments, and which ones they are: all that
    have these values in both runs."""

    numbers: Numbers
    lifted: dict[int, Number]
    """Numbers of the first tape that are registers already."""
    places: dict[int, dict[int | str, tuple[int, ...]]] = field(factory=dict)

    def compare(self, first: TapeStep, second: TapeStep) -> None:
        same = _form(first) == _form(second)
        outs = [None if out is None else out[1] for out in first.outs]
        if not same or outs != [None if out is None else out[1] for out in second.outs]:
            raise _OtherTapeError
        for place, value, b in _arguments(first, second):
            a = self.lifted.get(value.number, value) if type(value) is Register else value
            if self._is_same(a, b):
                continue
            numbers = self._numbers(a, b)
            if not numbers or place not in _number_arguments(first.name):
                raise _OtherTapeError
            self.places.setdefault(id(second), {})[place] = numbers

    def _is_same(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(self._is_same, a, b))
        if isinstance(a, float):
            return bits_of(a) == bits_of(b)
        if isinstance(a, (Register, Leaf)):
            return bool(a == b)
        return a is b or bool(a == b)

    def _numbers(self, a: Any, b: Any) -> tuple[int, ...]:
        if type(a) not in (float, int) or type(b) is not type(a):
            return ()
        told = (bits_of(a), bits_of(b))
        return tuple(at for at, (one, other) in enumerate(self.numbers) if (bits_of(one), bits_of(other)) == told)


def bits_of(number: Number) -> object:
    """Its type and value: all bits count."""
    return (int, number) if type(number) is int else struct.pack("<d", number)


def _number_arguments(name: str) -> frozenset[int | str]:
    space, _, rest = name.partition(".") if name.startswith("aten.") else ("", "", "")
    base, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, base, None) if space else None
    op = getattr(packet, overload or "default", None)
    return frozenset() if op is None else number_arguments(op)


def lift(first: Tape, second: Tape, numbers: NumbersToLift) -> TapeNumbers | str:
    """The numbers as registers of ``second``, if the tapes differ in them alone."""
    if first.reads != second.reads or len(first.steps) != len(second.steps) or len(first.roots) != len(second.roots):
        return "other operators run with another number"
    if not all(map(_same_memory, first.roots, second.roots)):
        return "other memory is read with another number"
    then, now = numbers.given(numbers.then), numbers.given(numbers.now)
    if then is None or now is None:
        return "Python cannot compute what operators get"
    comparison = _Comparison(list(zip(then, now, strict=True)), first.lifted)
    try:
        for a, b in zip(first.steps, second.steps, strict=True):
            comparison.compare(a, b)
    except _OtherTapeError:
        return "operators get what was computed from a number, or get one where it is more than a value"
    alike = list(dict.fromkeys(place for places in comparison.places.values() for place in places.values()))
    powers = {
        pair
        for step in second.steps if "pow" in step.name for pair in comparison.places.get(id(step), {}).values()
    }  # fmt: skip
    if any(float(value).is_integer() for power in powers for value in (then[power[0]], now[power[0]])):
        return "a whole number is an exponent"
    places = {
        step: {place: alike.index(pair) for place, pair in places.items()}
        for step, places in comparison.places.items()
    }  # fmt: skip
    registers = second.lift(places, [now[pair[0]] for pair in alike])
    used = tuple(number for pair in alike for number in pair)
    of_register = [register for register, pair in zip(registers, alike, strict=True) for _ in pair]
    of_powers = frozenset(at for at, number in enumerate(used) if any(number in power for power in powers))
    return TapeNumbers(second, used, of_register, of_powers)


def lift_like(known: TapeNumbers, second: Tape, given: Sequence[Number]) -> TapeNumbers | str:
    """The numbers as registers of ``second``, a tape of the same operators on tensors of other sizes, at the places
    where the ``known`` tape has registers. ``given``: all numbers that operators may have got in the second run."""
    first = known.tape
    if first.reads != second.reads or len(first.steps) != len(second.steps) or len(first.roots) != len(second.roots):
        return "other operators run with another size"
    numbers: dict[int, list[int]] = {}
    for register, number in zip(known.registers, known.used, strict=True):
        numbers.setdefault(register, []).append(number)
    alike, values = {register: at for at, register in enumerate(numbers)}, list[Number]()
    for several in numbers.values():
        values.append(given[several[0]])
        if any(bits_of(given[number]) != bits_of(values[-1]) for number in several):
            return "numbers that were equal are not any more"
    told = {bits_of(value) for value in given}
    places: dict[int, dict[int | str, int]] = {}
    for a, b in zip(first.steps, second.steps, strict=True):
        if _form(a) != _form(b):
            return "other operators run with another size"
        for place, was, now in _arguments(a, b):
            if type(was) is Register and was.number in alike:
                at = alike[was.number]
                if type(now) not in (float, int) or bits_of(now) != bits_of(values[at]):
                    return "operators get other numbers with another size"
                places.setdefault(id(b), {})[place] = at
            elif type(was) is not type(now) or not told.isdisjoint(_bits_in(now)):
                return "operators get such a number in another place, too"
    if len({at for several in places.values() for at in several.values()}) != len(values):
        return "not all numbers are found with another size"
    of_powers = {known.used[at] for at in known.powers}
    if any(float(given[number]).is_integer() for number in of_powers):
        return "a whole number is an exponent"
    registers = second.lift(places, values)
    return TapeNumbers(second, known.used, [registers[alike[one]] for one in known.registers], known.powers)


def _arguments(first: TapeStep, second: TapeStep) -> list[tuple[int | str, Any, Any]]:
    pairs: list[tuple[int | str, Any, Any]] = [
        (at, a, b) for at, (a, b) in enumerate(zip(first.args, second.args, strict=True))
    ]
    return pairs + [(key, first.kwargs[key], second.kwargs[key]) for key in first.kwargs]


def _bits_in(value: Any) -> Iterator[object]:
    """Those of the numbers among an operator's arguments."""
    if type(value) in (float, int):
        yield bits_of(value)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _bits_in(member)


def _form(step: TapeStep) -> tuple[Any, ...]:
    """What two steps have in common that differ in values alone."""
    return step.function, step.name, step.form, step.acts, step.single, len(step.args), list(step.kwargs)


def _same_memory(first: TapeMemory, second: TapeMemory) -> bool:
    if (first.kind, first.registers) != (second.kind, second.registers):
        return False
    if first.kind == "constant":
        assert first.storage is not None
        assert second.storage is not None
        return torch.equal(bytes_of(first.storage), bytes_of(second.storage))
    return first.path == second.path and (first.owner is None) == (second.owner is None)


@define(eq=False)
class TapeNumbers:
    """Implements ``capture.engines.base.LiftedNumbers`` for a tape."""

    tape: Tape
    used: tuple[int, ...]
    registers: Sequence[int]
    """The register of each number in ``used``. Numbers that were equal in both runs have the same one."""
    powers: frozenset[int]

    def takes(self, values: Sequence[Number]) -> bool:
        """Always True: operators on the CPU take any number."""
        if len(set(self.registers)) == len(self.registers):
            return True
        told = {(register, bits_of(value)) for register, value in zip(self.registers, values, strict=True)}
        return len(told) == len(set(self.registers))

    def put_one(self, at: int, value: Number) -> None:
        """Set the register of the number at this position of ``used``."""
        self.tape.registers[self.registers[at]] = value

    def put(self, values: Sequence[Number]) -> bool:
        """Set the registers."""
        for number, value in zip(self.registers, values, strict=True):
            self.tape.registers[number] = value
        return True
