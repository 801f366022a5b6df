"""Numbers on a tape that differ from call to call.

Two runs of a body with different values of a number give two tapes. If the tapes differ only in arguments of operators
that are the number itself in both, the operators get the number as it is, and the tape may run with any value: it
becomes a register. A value that Python computed from the number would differ otherwise, and a decision of the host
would give other operators.

Only arguments that are numbers by an operator's schema are given another one: of a range, the size depends on it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field

from capture.engines.base import Number
from capture.engines.cpu.tape import Leaf, Register, Tape, TapeMemory, TapeStep
from capture.key.tensor_meta import bytes_of
from capture.observe.operator_schema import number_arguments

Numbers = Sequence[tuple[float, float]]
"""For each number its values in the two runs."""


class _OtherTapeError(Exception):
    """The tapes differ in more than these numbers."""


@define(eq=False)
class _Comparison:
    """``places``: by ``id`` of a step, the positions of numbers in its arguments, and which ones they are."""

    numbers: Numbers
    lifted: dict[int, float]
    """Numbers of the first tape that are registers already."""
    places: dict[int, dict[int | str, int]] = field(factory=dict)

    def compare(self, first: TapeStep, second: TapeStep) -> None:
        same = _form(first) == _form(second)
        outs = [None if out is None else out[1] for out in first.outs]
        if not same or outs != [None if out is None else out[1] for out in second.outs]:
            raise _OtherTapeError
        pairs: list[tuple[int | str, Any, Any]] = [
            (at, a, b) for at, (a, b) in enumerate(zip(first.args, second.args, strict=True))
        ]
        pairs += [(key, first.kwargs[key], second.kwargs[key]) for key in first.kwargs]
        for place, value, b in pairs:
            a = self.lifted.get(value.number, value) if type(value) is Register else value
            if self._is_same(a, b):
                continue
            number = self._number(a, b)
            if number is None or place not in _number_arguments(first.name):
                raise _OtherTapeError
            self.places.setdefault(id(second), {})[place] = number

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

    def _number(self, a: Any, b: Any) -> int | None:
        if type(a) is not float or type(b) is not float:
            return None
        told = (bits_of(a), bits_of(b))
        found = [at for at, (one, other) in enumerate(self.numbers) if (bits_of(one), bits_of(other)) == told]
        return found[0] if len(found) == 1 else None


def bits_of(number: float) -> bytes:
    """Its 8 bytes."""
    return struct.pack("<d", number)


def _number_arguments(name: str) -> frozenset[int | str]:
    space, _, rest = name.partition(".") if name.startswith("aten.") else ("", "", "")
    base, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, base, None) if space else None
    op = getattr(packet, overload or "default", None)
    return frozenset() if op is None else number_arguments(op)


def lift(first: Tape, second: Tape, numbers: Numbers) -> TapeNumbers | str:
    """The numbers as registers of ``second``, if the tapes differ in them alone, and all of them are there."""
    if first.reads or second.reads or len(first.steps) != len(second.steps) or len(first.roots) != len(second.roots):
        return "other operators run with another number"
    if not all(map(_same_memory, first.roots, second.roots)):
        return "other memory is read with another number"
    comparison = _Comparison(numbers, first.lifted)
    try:
        for a, b in zip(first.steps, second.steps, strict=True):
            comparison.compare(a, b)
    except _OtherTapeError:
        return "operators get what was computed from a number, or get one where it is more than a value"
    met = {number for places in comparison.places.values() for number in places.values()}
    if len(met) < len(numbers):
        return "a number reaches no operator"
    powers = {
        number
        for step in second.steps for number in comparison.places.get(id(step), {}).values() if "pow" in step.name
    }  # fmt: skip
    if any(value.is_integer() for number in powers for value in numbers[number]):
        return "a whole number is an exponent"
    registers = second.lift(comparison.places, [value for _, value in numbers])
    return TapeNumbers(second, registers, frozenset(powers))


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
    """See ``LiftedNumbers``."""

    tape: Tape
    registers: Sequence[int]
    powers: frozenset[int]

    def takes(self, values: Sequence[Number]) -> bool:
        """Operators take any."""
        del values
        return True

    def put(self, values: Sequence[Number]) -> bool:
        """See there."""
        for number, value in zip(self.registers, values, strict=True):
            self.tape.registers[number] = value
        return True
