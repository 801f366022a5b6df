"""Formulas: what Python computes of numbers that the host read and of numbers in Python state, and keeps or returns
(``meter.update(loss.item(), n)``).

Such a read is another value in each call, and so is what follows from it. A replay does the arithmetic again, with the
values that it reads and the numbers that are in Python state then. That is right where a formula is all that comes of
the value, which runs with noted numbers show (``decisions``): ``item()`` gives them a number that notes its uses, in
one run the value that was read and in others another one. Each leaf of the result, and each place in Python state, that
holds such a number has its formula; a comparison, an index or C code that takes the value ends the proof.

Nothing need be read: where operators get such numbers (``numbers``), formulas tell what the body leaves of them.
"""

from __future__ import annotations

import dis
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.core.facts import Facts
from capture.key import pytree
from capture.key.attributes import keeper_of
from capture.key.input_places import InputPlace, number_place
from capture.key.packages import is_library, package_of
from capture.observe.computed import Computed, Left, unplaced
from capture.observe.described import DescribedRun
from capture.observe.returned_value import RETURNED, TAKEN
from capture.observe.run import ObservedRun, active_watch
from capture.runtime.noted_numbers import Formula, Noted, Noting, Question, holds_noted, plain_of
from capture.state.amounts import number_of_place
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.snapshot import Change
from capture.torch_private.monkeypatch import replaced
from capture.tree.output_structure import EffectSlot
from capture.tree.outputs import OutputPlan

_NUMBERS = (int, float)


@contextmanager
def read_as(give: Callable[[int, Any], Any]) -> Iterator[None]:
    """In the block, ``item()`` gives a watched body of this thread what ``give`` makes of the number that was read, for
    each read that formulas take; so does ``float(x)``, as a plain float. The watch knows which those are, as reads with
    these numbers may be others, where something new is read before them."""
    thread, item = threading.get_ident(), torch.Tensor.item

    def read(tensor: torch.Tensor) -> Any:
        watch = active_watch() if threading.get_ident() == thread else None
        before = -1 if watch is None else len(watch.trace.reads)
        value = item(tensor)
        if watch is None or len(watch.trace.reads) != before + 1 or before not in watch.trace.taken:
            return value
        return give(before, value) if type(value) in _NUMBERS else value

    def as_float(tensor: torch.Tensor) -> float:
        if tensor.numel() != 1 or tensor.is_complex():
            return own_float(tensor)
        value = read(tensor)
        if isinstance(value, Noted):  # nobody sees what becomes of a plain one: users' modules have another ``float``
            value.noting.is_read = True
        return float(plain_of(value))

    own_float: Callable[[torch.Tensor], float] = torch.Tensor.__float__
    with replaced(torch.Tensor, {"item": read, "__float__": as_float}):
        yield


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
    own: dict[int, Any] = field(factory=dict)
    """What it would have got."""
    unplaced: list[Change] = field(factory=list)
    """Changes of places that have to be arguments of the call."""
    is_lost: bool = False
    """A noted number went where no formula leads."""
    computed: Computed | None = None

    @property
    def numbers(self) -> Mapping[Any, Any]:
        """None are hidden: what operators got is compared."""
        return {}

    def takes(self, reads: Sequence[str]) -> bool:
        """See ``Formulas``."""
        return len(reads) in self.wanted

    def has(self, position: int, path: str) -> bool:
        """See ``Formulas``."""
        return position in self.positions

    @contextmanager
    def around(self) -> Iterator[None]:
        """Have ``item()`` give noted numbers to the body."""
        try:
            with read_as(self._noted) if self.wanted else nullcontext():
                yield
        finally:
            self.noting.is_over = True

    def _noted(self, number: int, value: Any) -> Any:
        self.own[number] = value
        value = self.read[number] = self.given.get(number, value)
        return self.noting.noted(value, Formula("", (("read", number),)))

    def found(self, watched: ObservedRun, left: Left) -> Computed | None:
        """See ``Formulas``."""
        effects = {path: value.formula for path, value in left.effects.items() if isinstance(value, Noted)}
        outputs = {path: value.formula for path, value in left.outputs.items() if isinstance(value, Noted)}
        others = [value for values in (left.effects, left.outputs) for value in values.values()]
        self.is_lost = any(not isinstance(value, Noted) and holds_noted(value) for value in others)
        taken = frozenset(self.read)
        reads = tuple([TAKEN if at in taken else text for at, text in enumerate(watched.watch.trace.reads)])
        asked = tuple(by_reads(self.noting.questions))
        self.computed = Computed(reads, taken, effects, outputs, asked, self.positions)
        self.unplaced = unplaced(watched, self.computed)
        return self.computed

    def plain(self, value: Any) -> Any:
        """See ``Formulas``."""
        return plain_of(value)


def read_by_number(facts: Facts | None, candidates: Sequence[Computed]) -> frozenset[int]:
    """The numbers of reads of which formulas may take the value: those that are compared, or taken so far. None of
    them where runs with other values would leave something that nobody can undo."""
    if facts is None or facts.calls_foreign or len(facts.reads) != len(facts.breaks):
        return frozenset()
    known = {number for one in candidates if one.branch() == facts.reads for number in one.taken}
    return frozenset(
        at
        for at, (text, read) in enumerate(zip(facts.reads, facts.breaks, strict=True))
        if at in known or (read.kind == "value" and not text.startswith(RETURNED) and _is_number(text))
    )


def is_of_read(question: Question) -> bool:
    """Whether a number that the host reads is part of what is asked."""
    return any(isinstance(variable, tuple) for variable in question.origins())


def by_reads(questions: Mapping[Question, Any]) -> list[tuple[Question, Any]]:
    """Questions with answers, from the first one on that a number which the host reads is a part of: whether those
    after it are asked may follow from its answer."""
    return list(itertools.dropwhile(lambda asked: not is_of_read(asked[0]), questions.items()))


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
    if source.is_in_argument() and pytree.is_container(holder):  # another call may be given another one
        return None
    return number_place(source.path, keeper_of(holder), source.name)


def placed(call: Call, described: DescribedRun, outputs: OutputPlan) -> tuple[tuple[EffectSlot, InputPlace], ...]:
    """Places that a recording writes and whose numbers its formulas read, where it has formulas."""
    if described.computed is None:
        return ()
    places = call.binder.places
    numbers = [number_of_place(places, effect.change.source) for effect in described.effects]
    pairs = zip(outputs.effects, numbers, strict=True)
    return tuple([(slot, places[number]) for slot, number in pairs if number is not None])


def asks_for_classes(ran: CodeRun) -> bool:
    """Whether users' code that ran may tell a noted number from a plain one: by its very class."""
    return any(
        not is_library(package_of(scope.get("__name__")))
        for code, scopes in ran.codes.items() if _asks_for_class(code)
        for scope in scopes
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _asks_for_class(code: types.CodeType) -> bool:
    """Whether the code has ``type`` or ``x.__class__``; not for ``x.device.type``."""
    if "type" not in code.co_names:
        return "__class__" in code.co_names
    return not {"__class__", "builtins"}.isdisjoint(code.co_names) or any(
        step.argval == "type" and step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM")
        for step in dis.get_instructions(code)
    )
