"""Given numbers: operators get what follows from numbers that the host reads in the body, as a loss is multiplied by
``alpha = log_alpha.exp().item()``; and beside those of numbers of the call, as where ``self.alpha`` was read in the
call before. What optimizers of torch read is left aside: their steps are islands.

A replay reads such a number as it reads any other (``branches``), and puts what Python computes of it (``formulas``)
where the recording has it, before the next segment runs. Where that is, two recordings of one call tell, as for the
arguments of a call (``numbers``): one of them, which is undone, is given other numbers than those that it reads. Only
what differs in both by just these formulas becomes a register.

One recording is enough where another one, of another size, has the same formulas: it tells the places.

A replay is compared with the body in the first call, and again in the fourth, sixteenth ... one. Values for which there
are kernels of their own have the body run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from attrs import field
from typing_extensions import override

from capture.core.data import define, frozen
from capture.core.interrupts import let_through
from capture.engines.base import LiftedNumbers, Number, NumbersToLift
from capture.observe.capture_lock import locked
from capture.observe.computed import Computed, Known, Left, Variable, same
from capture.observe.run import ObservedRun
from capture.runtime import branches, numbers, record
from capture.runtime.buckets import Count, Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.formula_program import BEFORE_READS
from capture.runtime.formulas import read_as
from capture.runtime.noted_numbers import Formula, may_be_given, may_vary
from capture.runtime.noted_runs import holding
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.tree.node import Node, Pattern
from capture.tree.tree import Tree

_FACTORS = (1.375, 0.59375, 1.0625, 0.9375, 1.0078125, 0.9921875)
_SHIFTS = (3, 1013, 2, 1, -1, -2)
"""By which the numbers of the other run may differ, each by another amount. No sign changes; whole ones stay such."""
_MOST_TRIES = 3  # recordings of one key of which that is not known


class NumbersBetween(LiftedNumbers, Protocol):
    """Numbers that are put one by one, between the segments of a replay."""

    registers: Sequence[int]
    """The place of each number in ``used``."""

    def put_one(self, at: int, value: Number) -> None:
        """Put the number at this position of ``used``."""


@define(eq=False)
class GivenNumbers:
    """Where a recording has them. ``formulas``: what operators get, in the order of ``places.used``."""

    places: NumbersBetween
    formulas: Sequence[Formula]
    ready: Mapping[int, Sequence[int]]
    """Positions in ``formulas``, by number of the read after which Python has all that they are made of, or
    ``BEFORE_READS``."""
    alike: Mapping[int, Sequence[int]]
    """Positions of others that were equal in both recordings, so that nobody can tell which one operators get."""
    count: Count = field(factory=Count)

    def put(self, number: int, numbers: Mapping[Variable, Any], known: dict[Formula, Any]) -> bool:
        """Put what is known after this read. False where a number cannot be put, so that the body has to run.
        ``known``: see ``Formula.value``."""
        for at in self.ready.get(number, ()):
            try:
                value = self.formulas[at].value(numbers, known)
            except (ArithmeticError, ValueError, TypeError):
                return False
            if not may_be_given(value, is_power=at in self.places.powers):
                return False
            if any(not self._is_same(other, value, numbers, known) for other in self.alike.get(at, ())):
                return False
            self.places.put_one(at, value)
        return True

    def _is_same(
        self, other: int, value: Number, numbers: Mapping[Variable, Any], known: dict[Formula, Any]
    ) -> bool:  # fmt: skip
        try:
            return same(self.formulas[other].value(numbers, known), value)
        except KeyError:  # of a number that is read later
            return True
        except (ArithmeticError, ValueError, TypeError):
            return False


@frozen(eq=False)
class _OtherReads(Known):
    """As ``Known``, for a run that gets other numbers than those that it reads."""

    read: dict[int, Number] = field(factory=dict)
    own: dict[int, Number] = field(factory=dict)
    """What it reads."""

    @override
    def around(self) -> AbstractContextManager[Any]:
        return read_as(self._other)

    def _other(self, number: int, value: Number) -> Number:
        """The first number by which the body goes the same way; the nearest, where none is found."""
        self.own[number] = value
        expected = self._answers(self.own)
        for factor, shift in zip(_FACTORS, _SHIFTS, strict=True):
            self.read[number] = _another(value, factor, shift, number)
            if self._answers(self.read) == expected:
                break
        return self.read[number]

    def _answers(self, read: Mapping[int, Number]) -> list[str | None]:
        """What the body answers, as far as it follows from these numbers."""
        numbers: dict[Variable, Any] = {**self.numbers, **{("read", at): value for at, value in read.items()}}
        return [one.told_at(at, numbers) for one in self.candidates for at in read if at in one.taken]

    @override
    def found(self, watched: ObservedRun, left: Left) -> Computed | None:
        trace = watched.watch.trace
        trace.kept.update({number: (value, trace.kept[number][1]) for number, value in self.read.items()})
        return super().found(watched, left)


def completed(
    captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern, make: Callable[[], Any]
) -> Any:  # fmt: skip
    """What ``make`` gives, which records the call. Where operators get what follows from what the host reads, the
    recording takes that from then on, or is dropped."""
    if not are_wanted(captured):
        return make()
    is_shared = not entry.is_alone and next(_of_other_sizes(captured, entry), None) is not None
    other = None if is_shared else _other(captured, entry, bound, tree, pattern)
    known = set(entry.nodes)
    try:
        result = make()
        made = [node for node in entry.nodes if node not in known]
        incomplete = [node for node in made if not _complete(captured, entry, tree, node, other)]
        for node in made:
            if node.given is not None and node in entry.nodes:
                branches.begin_alike(entry, node, tree)
    finally:
        if other is not None:
            tree.forget(other)
    if incomplete and is_shared:
        entry.is_alone = True
        _forget(entry, tree, incomplete)
    elif incomplete:
        _try_again(captured, entry, tree, incomplete)
    return result


def _of_other_sizes(captured: Captured, entry: Entry) -> Iterator[tuple[Computed, GivenNumbers]]:
    """Recordings of other entries of which it is known where they have numbers, the latest first: the same operators
    have them at the same places, whatever the sizes are."""
    for other in captured.entries()[::-1]:
        if other is not entry and other.backend is entry.backend:
            for node in other.nodes:
                if node.given is not None and node.computed is not None:
                    yield node.computed, node.given


def _try_again(captured: Captured, entry: Entry, tree: Tree, nodes: Sequence[Node]) -> None:
    """It is not known where recordings have the numbers, as of one that has a kernel of its own. Other calls may show
    it, if they do so soon."""
    entry.given_tries += 1
    if entry.given_tries > _MOST_TRIES:
        give_up(captured)
        return
    _forget(entry, tree, nodes)


def _forget(entry: Entry, tree: Tree, nodes: Sequence[Node]) -> None:
    for node in nodes:
        entry.nodes.remove(node)
        tree.forget(node)


def _other(captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern) -> Node | None:
    """Record the call with other numbers than its own and those that it reads, and undo that. None where that is no
    recording."""
    values = _with_others(captured, bound.values)
    known = captured.decisions.formulas(values, entry.constants) if captured.decisions is not None else None
    if known is None or tree.path or tree.warm:
        return None
    reads, nodes = _OtherReads(known.candidates, known.numbers), set(entry.nodes)

    def recorded() -> None:
        call = captured.call(values, bound.leaves, entry)
        call.formulas = reads
        record.record(captured, entry, call, tree, pattern, undo=True)

    run = BodyRun()
    try:
        body_run.during(run, holding, (captured.call(values, bound.leaves, entry), {}, recorded))
    except Exception as error:
        let_through(error)
        if run.error is not error:
            raise
        return None  # the body takes no such numbers
    tree.end_path("numbers")
    made = [node for node in entry.nodes if node not in nodes]
    if len(made) != 1 or made[0].parent is not tree.root:
        return None
    tree.take_out(made[0])  # else the next one, which begins in another way, ends it
    entry.nodes.remove(made[0])
    return made[0]


def _with_others(captured: Captured, values: Values) -> Values:
    """Other numbers of the call, with the same answers, where operators get what follows from those."""
    decisions = captured.decisions
    given = [] if decisions is None else [formula for one in decisions.candidates() for formula in one.given]
    wanted = sorted({at for formula in given for at in formula.origins() if isinstance(at, int)})
    positions = [decisions.positions[at] for at in wanted]
    for factor, shift in zip(_FACTORS, _SHIFTS, strict=True):
        own = [values[at] for at in positions]
        others = numbers.with_numbers(
            values, positions, [_another(one, factor, shift, at) for at, one in enumerate(own)]
        )
        if positions and decisions.parts(others) == decisions.parts(values):
            return others
    return values


def _another(value: Number, factor: float, shift: int, at: int) -> Number:
    return value + shift + at if type(value) is int else value * (factor + at / 65536)


def _complete(captured: Captured, entry: Entry, tree: Tree, node: Node, other: Node | None) -> bool:
    """Have a recording that was just made take what the host reads. False where it is not known how. ``other``: one of
    the same call with other numbers; without it one of another size tells it."""
    computed: Computed | None = node.computed
    if computed is None or not computed.given:  # after these answers operators get none
        return computed is not None
    if node.parent is not tree.root or node.recording is None:
        return False
    found = _by_other_size(captured, entry, tree, node) if other is None else _by_other(tree, node, other)
    if found is None or isinstance(found, str):
        if found is not None:
            captured.log.add("plan", f"numbers that are read stay as they are: {found}")
        return False
    if not all(may_vary(computed.given[at].value(node.first_numbers)) for at in found.used):
        return False
    formulas: list[Formula] = [cast(Formula, computed.given[at]) for at in found.used]
    ready: dict[int, list[int]] = {}
    for at, formula in enumerate(formulas):
        reads = [one[1] for one in formula.origins() if isinstance(one, tuple)]
        ready.setdefault(max(reads, default=BEFORE_READS), []).append(at)
    registers: dict[int, list[int]] = {}
    for at, register in enumerate(found.registers):
        registers.setdefault(register, []).append(at)
    alike = {at: several for several in registers.values() if len(several) > 1 for at in several}
    node.given, node.formulas = GivenNumbers(found, formulas, ready, alike), None
    return True


def _by_other_size(captured: Captured, entry: Entry, tree: Tree, node: Node) -> Any:
    """Where a recording has the numbers, by one of another size whose body computes the same. Each is looked for at its
    place, and the first replay is compared with the body, with the numbers of the next step."""
    computed: Computed = node.computed
    for computed_there, there in _of_other_sizes(captured, entry):
        if computed_there.text() == computed.text():
            try:
                given = [formula.value(node.first_numbers) for formula in computed.given]
            except (ArithmeticError, ValueError, TypeError, KeyError):
                return None
            return locked(tree.backend.lift_like, there.places, node.recording, given)
    return None


def _by_other(tree: Tree, node: Node, other: Node) -> Any:
    """The same by a recording of this call with other numbers."""
    computed: Computed = node.computed
    first, second, then, now = other.recording, node.recording, other.first_numbers, node.first_numbers
    if other.reads != node.reads or first is None or second is None or then.keys() != now.keys():
        return None
    order: list[Variable] = list(now)

    def given(own: Sequence[Number]) -> list[Number] | None:
        known: dict[Variable, Any] = dict(zip(order, own, strict=True))
        try:
            return [formula.value(known) for formula in computed.given]
        except (ArithmeticError, ValueError, TypeError, KeyError):
            return None

    def again(_: Sequence[Number]) -> Any:
        raise NotImplementedError

    to_lift = NumbersToLift(tuple(then[at] for at in order), tuple(now[at] for at in order), given, again)
    values = given(to_lift.now)
    if values is None or not numbers.differ(given(to_lift.then), values):
        return None
    return locked(tree.backend.lift, first, second, to_lift)


def give_up(captured: Captured) -> None:
    """What is read is compared again, or is left to the step of an optimizer, beside recordings."""
    reads_in_step = captured.optimizers.ask_host() and not captured.reads_stay
    captured.decisions, captured.reads_stay = None, True
    captured.decisions_left = captured.decisions_left if reads_in_step else 0
    captured.log.add("drop", "what the host reads is compared again")
    captured.retire()


def meet_others(captured: Captured, entry: Entry, values: Values) -> bool:
    """Whether numbers of the call, or in Python state, are others than in an earlier key. Such recordings are not made
    to serve several of those, too: what is read is compared again then."""
    if not are_wanted(captured):
        return False
    entries = captured.entries()
    twins = numbers.twins_of(entry, entries, (), values)
    changing = numbers.changing_places(captured, entry, values)
    if next(twins, None) is None and next(changing, None) is None:
        return False
    give_up(captured)
    return True


def are_wanted(captured: Captured) -> bool:
    """Whether operators get what follows from what the host reads, so that a recording has to take it."""
    return captured.decisions is not None and any(one.given for one in captured.decisions.candidates())
