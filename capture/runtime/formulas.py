"""Formulas: what Python computes of numbers that the host read and of numbers in Python state, and keeps or returns
(``meter.update(loss.item(), n)``).

Such a read is another value in each call, and so is what follows from it. A replay does the arithmetic again, with the
values that it reads and the numbers that are in Python state then. That is right where a formula is all that comes of
the value, which runs with noted numbers show (``decisions``): ``item()`` gives them a number that notes its uses, in
one run the value that was read and in others another one. Each leaf of the result, and each place in Python state, that
holds such a number has its formula; a comparison, an index or C code that takes the value ends the proof.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen

from capture.core.facts import Facts
from capture.key.input_places import InputPlace, number_place
from capture.key.packages import is_library, package_of
from capture.observe.computed import Computed, Left, Variable, unplaced
from capture.observe.described import DescribedRun
from capture.observe.returned_value import RETURNED, TAKEN
from capture.observe.run import ObservedRun, active_watch
from capture.runtime.noted_numbers import Formula, Noted, Noting, holds_noted, plain_of
from capture.state.amounts import number_of_place
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.snapshot import Change
from capture.torch_private.monkeypatch import replaced
from capture.tree.output_structure import EffectSlot
from capture.tree.outputs import OutputPlan

_NUMBERS = (int, float)


@frozen(eq=False)
class Expression:
    """A formula, with the positions of its numbers in a call."""

    formula: Formula
    positions: tuple[int, ...]

    def value(self, numbers: Mapping[Variable, Any]) -> Any:
        """See ``observe.computed.Formula``."""
        return self.formula.value(numbers)

    def text(self) -> str:
        """Equal for equal formulas."""
        return self.formula.text()

    def numbers(self, values: Sequence[Any]) -> dict[Variable, Any]:
        """Those of a call with these values."""
        return {at: values[position] for at, position in enumerate(self.positions)}


@define(eq=False)
class NotedReads:
    """A run that notes what is done with what it reads (``observe.computed.Formulas``)."""

    noting: Noting
    wanted: frozenset[int]
    """Numbers of the reads that it notes."""
    positions: tuple[int, ...]
    given: Mapping[int, Any] = field(factory=dict)
    """Numbers that it gets in the place of what it reads."""
    read: dict[int, Any] = field(factory=dict)
    """What it got."""
    unplaced: list[Change] = field(factory=list)
    """Changes of places that have to be arguments of the call."""
    is_lost: bool = False
    """A noted number went where no formula leads."""
    computed: Computed | None = None

    def takes(self, reads: Sequence[str]) -> bool:
        """See ``Formulas``."""
        return len(reads) in self.wanted

    @contextmanager
    def around(self) -> Iterator[None]:
        """Have ``item()`` give noted numbers to the body."""
        thread, item = threading.get_ident(), torch.Tensor.item

        def read(tensor: torch.Tensor) -> Any:
            watch = active_watch() if threading.get_ident() == thread else None
            before = -1 if watch is None else len(watch.trace.reads)
            value = item(tensor)
            if watch is None or len(watch.trace.reads) != before + 1 or before not in self.wanted:
                return value
            if package_of(sys._getframe(1).f_globals.get("__name__")) == "torch":
                return value  # an optimizer computes with it on tensors
            return self._noted(before, value) if type(value) in _NUMBERS else value

        try:
            with replaced(torch.Tensor, {"item": read}):
                yield
        finally:
            self.noting.is_over = True

    def _noted(self, number: int, value: Any) -> Any:
        value = self.read[number] = self.given.get(number, value)
        return self.noting.noted(value, Formula("", (("read", number),)))

    def found(self, watched: ObservedRun, left: Left) -> Computed | None:
        """See ``Formulas``."""
        effects = {path: self._expression(value) for path, value in left.effects.items() if isinstance(value, Noted)}
        outputs = {path: self._expression(value) for path, value in left.outputs.items() if isinstance(value, Noted)}
        others = [value for values in (left.effects, left.outputs) for value in values.values()]
        self.is_lost = any(not isinstance(value, Noted) and holds_noted(value) for value in others)
        taken = frozenset(self.read)
        reads = tuple([TAKEN if at in taken else text for at, text in enumerate(watched.watch.trace.reads)])
        self.computed = Computed(reads, taken, effects, outputs)
        self.unplaced = unplaced(watched, self.computed)
        return self.computed

    def _expression(self, value: Any) -> Expression:
        return Expression(value.formula, self.positions)

    def plain(self, value: Any) -> Any:
        """See ``Formulas``."""
        return plain_of(value)


def read_by_number(facts: Facts | None, candidates: Sequence[Computed]) -> frozenset[int]:
    """The numbers of reads of which formulas may take the value: those that are compared, or taken so far."""
    if facts is None or len(facts.reads) != len(facts.breaks):
        return frozenset()
    known = {number for one in candidates if one.reads == facts.reads for number in one.taken}
    return frozenset(
        at
        for at, (text, read) in enumerate(zip(facts.reads, facts.breaks, strict=True))
        if at in known or (read.kind == "value" and not text.startswith(RETURNED) and _is_number(text))
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def place_of(change: Change) -> InputPlace | None:
    """The place of a number that a formula gives, as an argument of the call; None where it can be none."""
    source = change.source
    if type(change.before) not in _NUMBERS or source.kind not in ("attribute", "item", "global", "closure"):
        return None
    holder = source.holder
    if type(holder) in (dict, types.CellType):
        return number_place(source.path, lambda: holder, source.name)
    try:
        return number_place(source.path, weakref.ref(holder), source.name)
    except TypeError:
        return None


def placed(call: Call, described: DescribedRun, outputs: OutputPlan) -> tuple[tuple[EffectSlot, InputPlace], ...]:
    """Places that a recording writes and whose numbers its formulas read, where it has formulas."""
    if not any(type(which) is Expression for _, which in outputs.reads):
        return ()
    places = call.binder.places
    numbers = [number_of_place(places, effect.change.source) for effect in described.effects]
    pairs = zip(outputs.effects, numbers, strict=True)
    return tuple([(slot, places[number]) for slot, number in pairs if number is not None])


def asks_for_classes(ran: CodeRun) -> bool:
    """Whether users' code that ran may tell a noted number from a plain one: by its very class."""
    return any(
        not is_library(package_of(scope.get("__name__")))
        for code, scopes in ran.codes.items() if not _CLASS.isdisjoint(code.co_names)
        for scope in scopes
    )  # fmt: skip


_CLASS = frozenset({"type", "__class__"})
