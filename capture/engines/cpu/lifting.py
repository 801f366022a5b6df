"""Numbers on a tape that are another in each call.

Two runs of a body with other values of a number give two tapes. Where these are the same but for arguments of
operators, and each of those is the number itself in both, the operators get it as it is, and the tape may run with any
other value: it is a register then. What Python made of the number would stand there with another value, and what the
host decided by it would be another operator.

Only operators that work element by element (torch's own tag) are given another number: the size of what others make may
follow from it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field

from capture.engines.cpu.tape import Leaf, Register, Tape, TapeMemory, TapeStep
from capture.key.tensor_meta import bytes_of

Numbers = Sequence[tuple[float, float]]
"""For each number what it was in the one run and in the other."""


class _OtherTapeError(Exception):
    """They differ in more than these numbers."""


@define(eq=False)
class _Comparison:
    """``places``: by ``id`` of a step, the positions of numbers in its arguments, and which ones they are."""

    numbers: Numbers
    lifted: dict[int, float]
    """Numbers of the first tape that are registers there."""
    places: dict[int, dict[int | str, int]] = field(factory=dict)

    def compare(self, one: TapeStep, other: TapeStep) -> None:
        same = (one.function, one.name, one.form, one.acts, one.single, len(one.args), list(one.kwargs)) == (
            other.function, other.name, other.form, other.acts, other.single, len(other.args), list(other.kwargs),
        )  # fmt: skip
        outs = [None if out is None else out[1] for out in one.outs]
        if not same or outs != [None if out is None else out[1] for out in other.outs]:
            raise _OtherTapeError
        pairs: list[tuple[int | str, Any, Any]] = [
            (at, a, b) for at, (a, b) in enumerate(zip(one.args, other.args, strict=True))
        ]
        pairs += [(key, one.kwargs[key], other.kwargs[key]) for key in one.kwargs]
        for place, known, b in pairs:
            a = self.lifted.get(known.number, known) if type(known) is Register else known
            if self._is_same(a, b):
                continue
            number = self._number(a, b)
            if number is None or not _works_by_element(one.name):
                raise _OtherTapeError
            self.places.setdefault(id(other), {})[place] = number

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


def _works_by_element(name: str) -> bool:
    """An operator that makes each element of what it is given, whatever numbers it gets."""
    space, _, rest = name.partition(".") if name.startswith("aten.") else ("", "", "")
    base, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, base, None) if space else None
    op = getattr(packet, overload or "default", None)
    return op is not None and torch.Tag.pointwise in op.tags


def lift(one: Tape, other: Tape, numbers: Numbers) -> TapeNumbers | None:
    """The numbers as registers of ``other``, if the tapes differ in them alone, and all of them are there."""
    if one.reads or other.reads or len(one.steps) != len(other.steps) or len(one.roots) != len(other.roots):
        return None
    if not all(map(_same_memory, one.roots, other.roots)):
        return None
    comparison = _Comparison(numbers, one.lifted)
    try:
        for a, b in zip(one.steps, other.steps, strict=True):
            comparison.compare(a, b)
    except _OtherTapeError:
        return None
    met = {number for places in comparison.places.values() for number in places.values()}
    if len(met) < len(numbers):
        return None
    powers = {
        number
        for step in other.steps for number in comparison.places.get(id(step), {}).values() if "pow" in step.name
    }  # fmt: skip
    if any(value.is_integer() for number in powers for value in numbers[number]):
        return None
    registers = other.lift(comparison.places, [second for _, second in numbers])
    return TapeNumbers(other, registers, frozenset(powers))


def _same_memory(one: TapeMemory, other: TapeMemory) -> bool:
    if (one.kind, one.registers) != (other.kind, other.registers):
        return False
    if one.kind == "constant":
        assert one.storage is not None
        assert other.storage is not None
        return torch.equal(bytes_of(one.storage), bytes_of(other.storage))
    return one.path == other.path and (one.owner is None) == (other.owner is None)


@define(eq=False)
class TapeNumbers:
    """See ``LiftedNumbers``."""

    tape: Tape
    registers: Sequence[int]
    powers: frozenset[int]

    def put(self, values: Sequence[float]) -> None:
        """See there."""
        for number, value in zip(self.registers, values, strict=True):
            self.tape.registers[number] = value
