"""What Python computes of numbers that the host read, and of numbers in Python state: which leaves of a run hold it.

Runs that note what is done with these numbers (``runtime.formulas``) prove for each such leaf a formula, and that
nothing else comes of the numbers. In any other run the leaves are those of the same places, if each of them is what its
formula gives, bit for bit; else the reads are compared like any other.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from attrs import evolve, field

from capture.core.data import define, frozen
from capture.key import pytree
from capture.observe.described import KeptEffect, KeptLeaf
from capture.observe.operator_schema import read_text
from capture.observe.returned_value import ASKED
from capture.observe.run import ObservedRun
from capture.state.amounts import number_of_place
from capture.state.effects import is_unread, uses_of_names
from capture.state.snapshot import Change
from capture.state.source import Source

_NUMBERS = (int, float)
Variable = int | tuple[str, int]
"""The position of a number among those of the call, or ``("read", 0)`` for one that the host reads."""


class Formula(Protocol):
    """How a number or text follows from others."""

    def value(self, numbers: Mapping[Variable, Any], known: dict[Any, Any] | None = None) -> Any:
        """What Python computes. Raises what it raises. ``known``: values of formulas for these numbers, to which this
        one adds: formulas share their parts."""

    def text(self) -> str:
        """Equal for equal formulas of any run."""

    def origins(self) -> frozenset[Variable]:
        """The numbers that it is made of."""


class Question(Protocol):
    """What the body asks of such numbers."""

    @property
    def text(self) -> str:
        """Equal for equal questions."""

    def origins(self) -> frozenset[Any]:
        """The numbers that it is about."""

    def answer(self, numbers: Mapping[Variable, Any], known: dict[Any, Any] | None = None) -> Any:
        """The answer. Raises what Python raises. ``known``: see ``Formula.value``."""


@frozen(eq=False)
class Computed:
    """The formulas of runs that read the same but for what is ``taken``, by the paths of the leaves. ``asked``: what
    they asked of these numbers, in turn, with the answers; ``positions``: those of numbers in a call."""

    reads: tuple[str, ...]
    taken: frozenset[int]
    effects: Mapping[str, Formula]
    outputs: Mapping[str, Formula]
    asked: tuple[tuple[Question, Any], ...] = ()
    positions: tuple[int, ...] = ()
    given: tuple[Formula, ...] = ()
    """Operators get some of these, besides."""

    def text(self) -> Any:
        """Equal for equal ones."""
        asked = [(question.text, answer) for question, answer in self.asked]
        return self.reads, self.taken, self.left_text(), asked, [one.text() for one in self.given]

    def left_text(self) -> Any:
        """Equal where runs with the same numbers leave the same."""
        return [{path: one.text() for path, one in found.items()} for found in (self.effects, self.outputs)]

    def is_any(self) -> bool:
        """Whether there is a formula of something that the run left."""
        return bool(self.effects or self.outputs)

    def has(self, position: int, path: str) -> bool:
        """Whether a formula has the number at this position among those of a call, or gives the one in its place."""
        formulas = (*self.effects.values(), *self.outputs.values())
        origins = [at for one in formulas for at in one.origins() if isinstance(at, int)]
        below = {one.partition(".")[2] for one in self.effects}  # the name of the first object may be another one there
        return path.partition(".")[2] in below or any(self.positions[at] == position for at in origins)

    @functools.cached_property
    def last_needed(self) -> tuple[int, ...]:
        """For each question the last read that it is about; where it is about none, that of those before it, whose
        answers lead to it."""
        found: list[int] = []
        for question, _ in self.asked:
            numbers = [one[1] for one in question.origins() if isinstance(one, tuple)]
            found.append(max(numbers or found, default=-1))
        return tuple(found)

    @functools.cached_property
    def _asked_at(self) -> Mapping[int, Sequence[tuple[Question, Any]]]:
        found: dict[int, list[tuple[Question, Any]]] = {}
        for one, last in zip(self.asked, self.last_needed, strict=True):
            found.setdefault(last, []).append(one)
        return found

    def told_at(
        self, number: int, numbers: Mapping[Variable, Any], known: dict[Any, Any] | None = None
    ) -> str | None:  # fmt: skip
        """What a run with these numbers, which is none of these runs, answers to the questions that the read at
        ``number`` decides; None where the answers are those of these runs. ``known``: see ``Formula.value``."""
        asked, known = self._asked_at.get(number, ()), {} if known is None else known
        try:
            answers = [question.answer(numbers, known) for question, _ in asked]
        except (ArithmeticError, ValueError, TypeError) as error:
            return f"{ASKED}{type(error).__name__}"
        if answers == [answer for _, answer in asked]:
            return None
        return _told(asked, answers)

    def branch(self, answers: Sequence[Any] | None = None) -> tuple[str, ...]:
        """The reads, as ``Facts.reads`` has them: the last one that is taken tells the answers, or ``answers``. It
        tells the questions, too, as after another answer the body may ask something else."""
        if not self.asked:
            return self.reads
        at, own = max(self.taken), [answer for _, answer in self.asked] if answers is None else answers
        return (*self.reads[:at], _told(self.asked, own), *self.reads[at + 1 :])

    def questions(self) -> tuple[str, ...]:
        """What is asked, in turn."""
        return tuple([question.text for question, _ in self.asked])

    def may_part_from(self, other: Computed) -> bool:
        """Whether both may be runs of one key: they ask the same, in turn, up to another answer."""
        for (question, answer), (theirs, answered) in zip(self.asked, other.asked, strict=False):
            if question.text != theirs.text:
                return False
            if answer != answered:
                return True
        return True

    def answers(self, numbers: Mapping[Variable, Any], known: dict[Any, Any] | None = None) -> list[Any]:
        """The answers for these numbers. Raises what Python raises. ``known``: see ``Formula.value``."""
        known = {} if known is None else known
        return [question.answer(numbers, known) for question, _ in self.asked]

    def numbers(self, values: Sequence[Any], read: Mapping[int, Any]) -> dict[Variable, Any]:
        """Those of a call with these values that read this."""
        own: dict[Variable, Any] = {at: values[position] for at, position in enumerate(self.positions)}
        return {**own, **{("read", number): value for number, value in read.items()}}

    def takes(self, reads: Sequence[str]) -> bool:
        """Whether the next read of such a run, which read these so far, is one that formulas take."""
        return len(reads) in self.taken and self.reads[: len(reads)] == tuple(reads)

    def is_of(self, left: Left, numbers: Mapping[Variable, Any]) -> bool:
        """Whether a run with these numbers left just that."""
        known: dict[Any, Any] = {}
        try:
            return self.answers(numbers, known) == [answer for _, answer in self.asked] and all(
                path in values and same(values[path], formula.value(numbers, known))
                for values, formulas in (({**left.there, **left.effects}, self.effects), (left.outputs, self.outputs))
                for path, formula in formulas.items()
            )
        except (ArithmeticError, ValueError, TypeError):
            return False


def _told(asked: Sequence[tuple[Question, Any]], answers: Sequence[Any]) -> str:
    return ASKED + "; ".join(f"{question.text}: {answer}" for (question, _), answer in zip(asked, answers, strict=True))


@define
class Left:
    """What a run left, by path."""

    there: dict[str, Any] = field(factory=dict)
    """What was in places before."""
    effects: dict[str, Any] = field(factory=dict)
    outputs: dict[str, Any] = field(factory=dict)


class Formulas(Protocol):
    """What is known of a call's formulas, or what is to be found out (``Call.formulas``)."""

    @property
    def numbers(self) -> Mapping[Variable, Any]:
        """Those of the call."""

    def takes(self, reads: Sequence[str]) -> bool:
        """Whether the next read, after these, is one that formulas take."""

    def has(self, position: int, path: str) -> bool:
        """Whether formulas have the number at this position among those of the call, or give the one in its place."""

    def around(self) -> AbstractContextManager[Any]:
        """Goes around the body."""

    def found(self, watched: ObservedRun, left: Left) -> Computed | None:
        """The formulas of what the run left; None where there are none."""

    def plain(self, value: Any) -> Any:
        """The number itself, where the run noted what is done with it."""


@frozen(eq=False)
class Known:
    """Formulas that were proven, of which some may fit a call with these numbers. ``shown``: for its own key."""

    candidates: Sequence[Computed]
    numbers: Mapping[Variable, Any]
    shown: Sequence[Computed] = ()

    def takes(self, reads: Sequence[str]) -> bool:
        """See ``Formulas``."""
        return any(one.takes(reads) for one in self.candidates)

    def has(self, position: int, path: str) -> bool:
        """See ``Formulas``."""
        return any(one.has(position, path) for one in self.candidates)

    def around(self) -> AbstractContextManager[Any]:
        """See ``Formulas``."""
        return contextlib.nullcontext()

    def found(self, watched: ObservedRun, left: Left) -> Computed | None:
        """See ``Formulas``."""
        own = [one for one in self.shown if self._is_of(watched, left, one)]
        return only_one(own or (one for one in self._likely() if self._is_of(watched, left, one)))

    def _likely(self) -> Sequence[Computed]:
        """Those that may be of this key: they ask what is known to be asked for it, and no other one asks something
        else after the same answers, as with another constant."""
        if not self.shown:
            return self.candidates
        known = [*self.shown, *self.candidates]
        return [one for one in self.candidates if all(one.may_part_from(other) for other in known)]

    def _is_of(self, watched: ObservedRun, left: Left, one: Computed) -> bool:
        trace = watched.watch.trace
        is_read = one.reads == tuple(trace.reads) and all(number in trace.kept for number in one.taken)
        return is_read and one.is_of(left, {**self.numbers, **_read(watched, one)}) and not unplaced(watched, one)

    def plain(self, value: Any) -> Any:
        """See ``Formulas``."""
        return value


@frozen(eq=False)
class KnownOf:
    """As ``Known``, for formulas of which each has its own positions among the values of a call."""

    candidates: Sequence[Computed]
    values: Sequence[Any]

    @property
    def numbers(self) -> Mapping[Variable, Any]:
        """None are hidden: what operators got is compared."""
        return {}

    def takes(self, reads: Sequence[str]) -> bool:
        """See ``Formulas``."""
        return False

    def has(self, position: int, path: str) -> bool:
        """See ``Formulas``."""
        return any(one.has(position, path) for one in self.candidates)

    def around(self) -> AbstractContextManager[Any]:
        """See ``Formulas``."""
        return contextlib.nullcontext()

    def found(self, watched: ObservedRun, left: Left) -> Computed | None:
        """See ``Formulas``."""
        each = (Known((one,), one.numbers(self.values, {})).found(watched, left) for one in self.candidates)
        return only_one(one for one in each if one is not None)

    def plain(self, value: Any) -> Any:
        """See ``Formulas``."""
        return value


def only_one(fitting: Iterable[Computed]) -> Computed | None:
    """The first of those that fit a run. None where another one gives the same of these numbers and something else of
    others, or asks something else, as calls with other keys have other constants: nobody can tell which one it was
    (``loss * 0.5`` of 0, ``loss < 0.1`` of 5). What operators get in some of them, they may get in this run."""
    found = [*fitting]
    if len({repr((one.left_text(), one.questions())) for one in found}) != 1:
        return None
    given = {formula.text(): formula for one in found for formula in one.given}
    if len(given) == len(found[0].given):
        return found[0]
    alike = len({(one.reads, one.taken, one.positions) for one in found}) == 1
    return evolve(found[0], given=tuple(given.values())) if alike else None


def settle(watched: ObservedRun) -> Computed | None:
    """The formulas of what the run left. Without any, the reads that they would take are compared."""
    formulas, trace = watched.call.formulas, watched.watch.trace
    found: Computed | None = None if formulas is None else formulas.found(watched, left_by(watched))
    if found is not None:
        trace.reads[:] = found.branch()
        trace.scalars[:] = without_given(found, trace.scalars, {**formulas.numbers, **_read(watched, found)})
    elif formulas is not None:
        for number in trace.taken:
            trace.reads[number] = read_text(trace.kept[number][0])
    return found


def _read(watched: ObservedRun, computed: Computed) -> dict[Variable, Any]:
    return {("read", number): watched.watch.trace.kept[number][0] for number in computed.taken}


def without_given(
    computed: Computed, scalars: Sequence[tuple[str, ...]], numbers: Mapping[Variable, Any]
) -> list[tuple[str, ...]]:
    """What operators got besides tensors, as text, without the numbers that follow from what is read: equal texts mean
    runs that did the same."""
    texts = {repr(formula.value(numbers)) for formula in computed.given}
    if not texts:
        return [*scalars]
    return [tuple([_without(text, texts) for text in several]) for several in scalars]


def _without(text: str, texts: Collection[str]) -> str:
    place, is_told, value = text.partition("=")
    parts = [(part, part.strip("[]() ")) for part in value.split(",")]
    return place + is_told + ",".join([part.replace(bare, "number") if bare in texts else part for part, bare in parts])


def left_by(watched: ObservedRun) -> Left:
    """The leaves of the result, and those of places that changed, or that hold what they held before."""
    left = Left()
    for source, value in watched.before.sources.values():
        left.there[source.path] = value
    for change in watched.changed:
        if change.amount is None:
            left.effects |= dict(pytree.leaves(change.after, change.source.path))
    left.outputs |= dict(pytree.result_leaves(watched.result))
    return left


def with_unchanged(watched: ObservedRun, computed: Computed | None, changes: Sequence[Change]) -> list[Change]:
    """All of them, and places with a formula that hold the same value as before: by the next call it is another. The
    order is that of the places: a run tells amounts first, and which places have one may differ."""
    if computed is None:
        return [*changes]
    told = {path for change in changes for path, _ in pytree.leaves(change.after, change.source.path)}
    there = {source.path: source for source, _ in watched.before.sources.values()}
    made_again = watched.before.rebuilt
    unchanged = [_to_set(there[path], made_again) for path in computed.effects if path not in told and path in there]
    more = {source.path: source for source in unchanged}.values()
    order = {id(source): at for at, source in enumerate(there.values())}
    every = [*changes, *[Change(source, value, value) for source in more for value in (source.get(),)]]
    return sorted(every, key=lambda change: order.get(id(change.source), len(order)))


def _to_set(source: Source, made_again: Collection[str]) -> Source:
    """The place that a body sets for a value to be here: that of the whole, where it makes the whole again or is given
    a tuple."""
    chain = [*source.chain()]
    whole = [at for at, one in enumerate(chain) if one.path in made_again]
    at = max(whole, default=0)
    while isinstance(chain[at].holder, tuple) and at + 1 < len(chain):
        at += 1
    return chain[at]


def in_order(watched: ObservedRun, changes: Sequence[Change], more: Sequence[Change]) -> list[Change]:
    """All changes in the order in which a run tells them: that is the same in each."""
    told = [*changes]
    order = {id(source): at for at, (source, _) in enumerate(watched.before.sources.values())} if more else {}
    for change in more:
        own = order[id(change.source)]
        later = (at for at, other in enumerate(told) if order.get(id(other.source), len(order)) > own)
        told.insert(next(later, len(told)), change)
    return told


def unplaced(watched: ObservedRun, computed: Computed) -> list[Change]:
    """Places that get what a formula gives, or another number, and on whose former value something may depend that no
    formula has: they are no arguments of the call, and code that ran names them."""
    uses, found = uses_of_names(watched.ran), list[Change]()
    for change in with_unchanged(watched, computed, watched.changed):
        paths = [path for path, _ in pytree.leaves(change.after, change.source.path)]
        is_placed = number_of_place(watched.call.binder.places, change.source) is not None
        is_told = not computed.effects.keys().isdisjoint(paths)
        is_number = type(change.before) is type(change.after) and type(change.after) in _NUMBERS
        is_known = change.container or change.amount is not None or is_placed
        if (is_told or is_number) and not is_known and not is_unread(watched.before, change.source, uses):
            found.append(change)
    return found


def marked(watched: ObservedRun, computed: Computed | None, effects: Sequence[KeptEffect]) -> list[KeptEffect]:
    """The effects, with the formulas of their leaves."""
    if computed is None:
        return [*effects]
    found = []
    for effect in effects:
        leaves = tuple([of_formula(watched, leaf, computed.effects) for leaf in effect.leaves])
        if all(leaf.path not in computed.effects for leaf in leaves):
            found.append(effect)
            continue
        was, changed = effect.change, watched.changed
        change = evolve(was, is_read_anew=True)
        is_there = any(one is was for one in changed)
        changed[:] = [change if one is was else one for one in changed] + [change] * (not is_there)
        found.append(KeptEffect(change, leaves))
    return found


def of_formula(watched: ObservedRun, leaf: KeptLeaf, formulas: Mapping[str, Formula]) -> KeptLeaf:
    """The leaf, with its formula, if it has one."""
    formula = formulas.get(leaf.path) if leaf.kind == "python" else None
    return leaf if formula is None else evolve(leaf, value=watched.call.formulas.plain(leaf.value), read=formula)


def same(one: Any, other: Any) -> bool:
    """Whether two numbers or texts are of one type, and equal bit for bit."""
    if type(one) is not type(other):
        return False
    return struct.pack("d", one) == struct.pack("d", other) if type(one) is float else bool(one == other)
