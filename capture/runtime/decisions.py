"""Decisions: plain numbers, arguments or in Python state, of which the body only asks something (``step % 4 == 0``).

A number is a part of the key. A step that counts up is another key in each call, though the body does one of two
things. So the key has the answers in its place, where this was found out in runs that leave no trace, with a caller's
number and with others that give the same answers:

* the number notes what Python code does with it (``noted_numbers``): it is compared, and what is computed of it is, and
  nothing else comes of it: no result, nothing in Python state, and no text has it;
* all that operators got, what the body returned and what it left are equal, bit for bit, in all these runs. Each number
  that is computed on the way is another one in one of them, but for one that its answer tells (``step % 4 == 0``);
* the plain run does the same.

A number in Python state becomes an input of the call (``key.input_places``). The body may count it up besides, as in
``self.step += 1``: what it leaves there is the number and a constant that is the same in all runs with these answers,
which a replay adds to what is there then.

A call of another size has another entry. For that one run is enough, with the other numbers of an earlier proof, where
the same code does the same with them, at the same places (``_shown_again``).

Which questions are asked may follow from earlier answers, so they are a tree. It is proven for each entry, between its
watched run and its recording, as only a watched run shows that another one can be undone; and again when its recordings
are dropped. Where more comes of the numbers after some answers (``if step % 10 == 0: print(step)``), calls with those
answers run eagerly. The body may branch on truths that it reads on the device, too (``if torch.isfinite(x).all()``):
what it does with the numbers is proven for each of these branches, when a call first goes that way, and a recording is
kept only where that was shown of what it read.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field

from capture.core.data import define, frozen
from capture.core.facts import Facts
from capture.core.interrupts import let_through
from capture.engines.base import Number
from capture.key.argument_numbers import are_numbers
from capture.key.input_places import InputPlace, with_places
from capture.observe.computed import Computed, Known, Variable, same, without_given
from capture.observe.facts_builder import READ_ANEW
from capture.observe.returned_value import ASKED, RETURNED
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.entry import MOST_BRANCHES, Entry
from capture.runtime.formulas import NotedReads, asks_for_classes, is_of_read, place_of, read_by_number
from capture.runtime.noted_math import noting_math
from capture.runtime.noted_numbers import Formula, Noting, Question, holds_noted, others_than
from capture.runtime.noted_runs import noted_amounts, watched_with
from capture.runtime.numbers import (
    NAMED,
    SETTINGS,
    differing_parts,
    number_of,
    places_of_part,
    reads_in_c,
    same_but,
    sets_anew,
    tail_of,
    with_numbers,
)
from capture.runtime.verdict import Verdict
from capture.state import body_run
from capture.state.amounts import Amounts, number_of_place, position_of
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.state.snapshot import Change
from capture.torch_private.threads import others_may_run

_PLAIN = (int, float)
_MOST_LEAVES = 12  # ways that the answers lead to
_MOST_ENTRIES = 64  # that are searched for one that has another number
_FIRST_KEYS = 2  # of a training step: without gradients and with them
_MOST_TRIES = 3  # runs in which the step of an optimizer shows too little of its numbers
_MOST_PLACES = 16  # numbers in Python state, which are read in each call
_MOST_ROUNDS = 4  # in which further places become arguments
_TRIED = 4096
_MOST_VALUES = 40_000  # that are computed to find other numbers
_MOST_SHOWN = 4  # proofs that are kept for calls of other sizes


@define(eq=False)
class _Asked:
    """A question, and what follows each answer: the next one; True where nothing else comes of the numbers; False where
    the numbers themselves stay in the key."""

    question: Question
    after: dict[Any, _Asked | bool] = field(factory=dict)


@define(eq=False)
class Decisions:
    """The numbers at some positions among the arguments and the places that count as such, and what the body asks of
    them."""

    positions: tuple[int, ...]
    kinds: tuple[type, ...]
    _first: _Asked | bool | None = None
    _count: int = 0
    _amounts: dict[tuple[Any, ...], dict[tuple[Any, ...], Mapping[int, int]]] = field(factory=dict)
    """For each tuple of answers, and of what is read (``Computed.branch``), what the body adds to numbers in Python
    state, by position."""
    _changed: dict[tuple[Any, ...], frozenset[int]] = field(factory=dict)
    """For each tuple of answers with what is read, the places that runs changed."""
    _computed: dict[tuple[Any, ...], list[Computed]] = field(factory=dict)
    """For each tuple of answers, what Python computes of numbers and the body leaves (``formulas``)."""
    _shown_for: dict[Any, list[Computed]] = field(factory=dict)
    """Of these, those of keys with the same ``Entry.constants``."""
    _standing: dict[tuple[Any, ...], tuple[Number, ...]] = field(factory=dict)
    """For each tuple of answers, the numbers of one call that gave them."""
    _replays_then: int = -1
    """How many replays there were when a call had numbers of other types."""
    calls_foreign: bool = False
    """See ``Facts.calls_foreign``."""
    _proven: set[tuple[Any, ...]] = field(factory=set)
    """Answers, with the values read that replays compare, after which it was shown that nothing else comes of the
    numbers."""
    reads_others: bool = False
    """The body reads values that replays compare: after others it may do something else with the numbers."""
    has_all_places: bool = False
    """No further places are looked for."""
    _shown: list[Shown] = field(factory=list)
    """What was shown in runs with other numbers, the latest last."""

    def own(self, values: Values) -> list[Number] | None:
        """The numbers of a call; None where they are of other types."""
        numbers = [values[at] for at in self.positions]
        return numbers if tuple(map(type, numbers)) == self.kinds else None

    def is_passing(self, values: Values, replays: int) -> bool:
        """Whether this call has numbers of other types, which calls before it had not, as where a meter is set back to
        0 in every tenth call. ``replays``: how many there were so far."""
        if not self.positions or self.own(values) is not None:
            return False
        before, self._replays_then = self._replays_then, replays
        return before != replays

    def parts(self, values: Values) -> Mapping[int, Any]:
        """What the key has in the place of numbers, by position."""
        own = self.own(values)
        answers, is_enough = self._walked(own) if own is not None else ((), False)
        if is_enough is False or (is_enough is None and self._count >= _MOST_LEAVES):
            return {}
        return {at: ("answers", *(answers if at == self.positions[0] else ())) for at in self.positions}

    def _walked(self, own: Sequence[Number]) -> tuple[tuple[Any, ...], bool | None]:
        """The answers, and whether they stand for the numbers; None where that is not known."""
        answers, at = list[Any](), self._first
        while isinstance(at, _Asked):
            try:
                answer = at.question.answer(own)
            except (ArithmeticError, ValueError, TypeError):
                return tuple(answers), False
            answers.append(answer)
            at = at.after.get(answer)
        return tuple(answers), at

    def forbids(self, values: Values) -> bool:
        """Whether more comes of these numbers than their answers."""
        return bool(self.positions) and self.own(values) is not None and not self.parts(values)

    def shown_for(self, constants: Any) -> list[Computed]:
        """What was proven for keys with these ``Entry.constants``: other ones may be compared with other numbers."""
        return self._shown_for.setdefault(constants, [])

    def formulas(self, values: Values, constants: Any = None) -> Known | None:
        """See ``Call.formulas``. As for amounts, what was proven for other answers counts as likely. So does what was
        proven for other keys, until some was for one with these ``constants``."""
        own = self.own(values)
        if own is None or not self._computed:
            return None
        proven = self._computed.get(self._walked(own)[0])
        likely = proven if proven is not None else [one for several in self._computed.values() for one in several]
        return Known(tuple(likely), dict(enumerate(own)), tuple(self._shown_for.get(constants, ())))

    def branch_of(self, values: Values, numbers: Numbers, other: Computed) -> tuple[str, ...] | None:
        """What a run with these numbers, and those that it read, is known to read, as ``Facts.reads`` has it, where an
        ``other`` run of the same key asked and answered something else."""
        known = self.formulas(values)
        for one in known.candidates if known is not None else ():
            try:
                if one.may_part_from(other) and one.answers(numbers) == [answer for _, answer in one.asked]:
                    return one.branch()
            except (ArithmeticError, ValueError, TypeError, KeyError):
                continue
        return None

    def is_known(self, reads: tuple[str, ...]) -> bool:
        """Whether it was proven what the body leaves after these answers."""
        return any(one.branch()[: len(reads)] == reads for one in self.candidates())

    def takes(self, reads: Sequence[str], *, asks: bool = False) -> bool:
        """Whether formulas take the last of these values that the host read, so that it need not come again. ``asks``:
        in a body that asks something of such values."""
        return any(len(reads) - 1 in one.taken and (one.asked or not asks) for one in self.candidates())

    def covers(self, values: Values, facts: Facts) -> bool:
        """Whether it was shown what a run with these numbers does with them, which read this. Where values are compared
        that formulas took in the runs that showed it, nothing was: the numbers may be asked for together with those."""
        own, read = self.own(values), read_and_compared(facts)
        if not (self.reads_others or read) or not self.positions or own is None:
            return True
        return (self._walked(own)[0], read) in self._proven

    def candidates(self) -> list[Computed]:
        """All formulas that were proven."""
        return [one for several in self._computed.values() for one in several]

    def standing(self, values: Values) -> Values:
        """These values, with numbers that are the same for all calls with the same answers: for fast paths, which
        compare numbers."""
        own = self.own(values)
        answers, is_enough = self._walked(own) if own is not None else ((), False)
        numbers = self._standing.setdefault(answers, tuple(own)) if own is not None and is_enough else None
        return values if numbers is None else with_numbers(values, self.positions, numbers)

    def amounts(self, call: Call) -> Amounts | None:
        """See ``Call.amounts``. Where nothing is known of these answers, what the body adds after other answers counts
        as likely; it is proven before a recording is made."""
        places, own = call.binder.places, self.own(call.values)
        if own is None or not places or not self._amounts:
            return None
        proven = self._amounts.get(self._walked(own)[0])
        known = [proven] if proven is not None else list(self._amounts.values())
        likely = [amounts for by_reads in known for amounts in by_reads.values()]
        first = len(call.values) - len(places)

        def amount(change: Change) -> int | None:
            at = position_of(places, first, change)
            if at is None or type(change.before) is not int or type(change.after) is not int:
                return None
            added = change.after - change.before
            return added if any(amounts.get(at) == added for amounts in likely) else None

        return amount

    def changes(self, values: Values, reads: tuple[str, ...]) -> frozenset[int]:
        """See ``Call.changes``. A run may set a number to what it is: another run with the same answers changes it."""
        own = self.own(values)
        known = None if own is None else self._changed.get((self._walked(own)[0], reads))
        return frozenset().union(*self._changed.values()) if known is None else known

    def shown_like(self, own: Sequence[Number], wanted: frozenset[int]) -> Shown | None:
        """What was shown last for calls with the same answers as one with these numbers."""
        answers = self._walked(own)[0]
        for shown in self._shown[::-1]:
            if shown.wanted == wanted and self._walked([shown.numbers[at] for at in range(len(own))])[0] == answers:
                return shown
        return None

    def learn(self, proof: _Proof) -> bool:
        """Keep what a run showed. False where it asked something else than an earlier one after the same answers."""
        if proof.shown is not None:
            self._shown[:] = [*self._shown[1 - _MOST_SHOWN :], proof.shown]
        questions, answers, is_enough = list(proof.asked.items()), tuple(proof.asked.values()), proof.is_enough
        reads = () if proof.computed is None else proof.computed.branch()
        if is_enough and self._amounts.setdefault(answers, {}).setdefault(reads, proof.amounts) != proof.amounts:
            return False
        if is_enough:
            self._proven.add((answers, proof.compared))
            self.reads_others = self.reads_others or bool(proof.compared)
            self._changed[answers, reads] = self._changed.get((answers, reads), frozenset()) | proof.changed
        if is_enough and proof.computed is not None:
            known = self._computed.setdefault(answers, [])
            if all(one.text() != proof.computed.text() for one in known):
                known.append(proof.computed)
        if not questions:
            self._first = is_enough if self._first is None else self._first
            return self._first is is_enough
        self._first = _Asked(questions[0][0]) if self._first is None else self._first
        at: _Asked | bool | None = self._first
        for number, (question, answer) in enumerate(questions):
            if not isinstance(at, _Asked) or at.question != question:
                return False
            is_last = number + 1 == len(questions)
            following = is_enough if is_last else _Asked(questions[number + 1][0])
            kept = at.after.setdefault(answer, following)
            if is_last:
                self._count += kept is following
                if isinstance(kept, _Asked):
                    return False
                at.after[answer] = is_enough
            at = kept
        return True

    def forbid(self, values: Values) -> None:
        """Note that more comes of these numbers than their answers."""
        own, at = self.own(values), self._first
        while own is not None and isinstance(at, _Asked):
            try:
                answer = at.question.answer(own)
            except (ArithmeticError, ValueError, TypeError):
                return  # as it is
            following = at.after.get(answer)
            if not isinstance(following, _Asked):
                at.after[answer] = False
                self._count += following is None
                return
            at = following


# ----------------------------------------------------------------------------------------------------- when it is found


def begins(captured: Captured, entry: Entry, bound: Call) -> bool:
    """Put answers in the place of numbers from now on, where a new key differs from an earlier one in numbers alone,
    and only answers count of those. All that was recorded is dropped then. False where that is not so."""
    kept: Decisions | None = captured.decisions
    if captured.sizes is not None or captured.is_backward:
        return False
    if kept is not None and kept.is_passing(bound.values, captured.log.counters.replays):
        return False
    varying = _varying(captured, entry, bound.values, kept)
    if varying is None:
        return False
    captured.decisions_left -= 1
    positions, watched, places, facts = varying
    call = captured.call(watched, bound.leaves)
    call.binder = with_places(call.binder, places)
    wanted = read_by_number(facts, () if kept is None else kept.candidates())
    return _begins_with(captured, entry, call, positions, places, wanted)


def _begins_with(
    captured: Captured, entry: Entry, call: Call, positions: tuple[int, ...], places: list[InputPlace],
    wanted: frozenset[int],
) -> bool:  # fmt: skip
    """Whether answers and formulas stand for these numbers and for what the host reads from now on. Where a formula
    gives numbers in places that are no arguments yet, these become arguments, too. ``wanted``: reads of which formulas
    may take the value."""
    for _ in range(_MOST_ROUNDS):
        decisions = Decisions(positions, tuple(type(call.values[at]) for at in positions))
        learned = _learned(captured, call, decisions, wanted)
        if learned.is_open and not positions and entry.branch_proofs <= 2 * MOST_BRANCHES:  # new keys would go on
            entry.branch_proofs += 1
            entry.has_tried_formulas, captured.decisions_left = False, captured.decisions_left + 1
        more = [place_of(change) for change in learned.unplaced] if learned.is_enough else []
        added = [place for place in more if place is not None]
        if not more:
            break
        if len(added) < len(more) or others_may_run() or len(places) + len(added) > _MOST_PLACES:
            return False
        first = len(call.values)
        call = evolve(call, values=(*call.values, *[place.read() for place in added]))
        call.binder = with_places(call.binder, added)
        places, positions = [*places, *added], (*positions, *range(first, first + len(added)))
    if learned.is_enough is None:
        captured.decisions_left = 0  # the code is the same with other numbers
    if not learned.is_enough or learned.unplaced:
        return False
    captured.take_inputs(places)
    captured.decisions = decisions
    captured.log.add("drop", "answers of the body, and formulas, stand for numbers from now on")
    captured.retire()
    captured.budget.start_anew()
    return True


def hold(captured: Captured, entry: Entry, bound: Call) -> Verdict:
    """Prove, before the first recording of an entry, that what its key leaves out of numbers does not count. START_OVER
    where it does, and the key is another one now; EAGER where nothing was shown, and no other key tells this call from
    those that it is shown for: the body raises, or only a value that it reads tells its way."""
    if begins_with_reads(captured, entry, bound):
        return Verdict.START_OVER
    decisions: Decisions | None = captured.decisions
    if decisions is None:
        return Verdict.GO_ON
    # the first recording needs the answers of its own call, if the body asks something of what it reads
    tells_more = decisions.reads_others or any(one.asked for one in decisions.candidates())
    is_proven = entry.asks_no_more and (bool(entry.nodes) or not tells_more)
    is_proven = is_proven and not (decisions.reads_others and decisions.positions)
    before = decisions.parts(bound.values)
    if is_proven or (decisions.positions and not before):
        return Verdict.GO_ON
    if entry.facts is None or calls_out(entry.facts):
        decisions.forbid(bound.values)
        return _after_forbidding(captured, entry, bound, before) if decisions.positions else Verdict.GO_ON
    wanted = read_by_number(entry.facts, decisions.candidates())
    plain = None if entry.shares_no_proof else entry.facts
    learned = _learned(captured, bound, decisions, wanted, plain, constants=entry.constants)
    entry.is_alone = entry.is_alone or not learned.is_shared
    if learned.unplaced and _takes_more_places(captured, entry, bound, wanted):
        return Verdict.START_OVER
    is_enough = False if learned.unplaced else learned.is_enough
    if entry.asks_no_more and not (decisions.reads_others and decisions.positions):  # those before stay proven
        return Verdict.GO_ON
    entry.asks_no_more = is_enough is True
    if is_enough is None:
        _forget(captured)
    elif not is_enough:
        return _after_forbidding(captured, entry, bound, before)
    return Verdict.GO_ON if is_enough else Verdict.START_OVER


def _after_forbidding(captured: Captured, entry: Entry, bound: Call, before: Mapping[int, Any]) -> Verdict:
    """How a call goes on whose numbers do more than answer. ``before``: what its key had in their place so far. To
    start over with the same key would never end."""
    decisions: Decisions = captured.decisions
    if decisions.parts(bound.values) != before:
        return Verdict.START_OVER
    entry.branch_proofs += 1
    if entry.branch_proofs <= 2 * MOST_BRANCHES:
        return Verdict.EAGER
    _forget(captured)
    return Verdict.START_OVER


def _forget(captured: Captured) -> None:
    captured.decisions, captured.decisions_left = None, 0
    captured.log.add("drop", "numbers are part of the key again")
    captured.retire()


@frozen
class _Learned:
    """Whether answers and formulas are enough after those of a call; None where the body asks nothing, or something
    else than before. ``unplaced``: changes of places that have to be arguments for that."""

    is_enough: bool | None
    unplaced: Sequence[Change] = ()
    is_open: bool = False
    """Nothing was shown, as the body raised an error or all other numbers lead elsewhere: another call may show it."""
    is_shared: bool = False
    """It was shown by what is known of another size."""


def _learned(
    captured: Captured, call: Call, decisions: Decisions, wanted: frozenset[int], facts: Facts | None = None, *,
    is_branch: bool = False, constants: Any = None,
) -> _Learned:  # fmt: skip
    """Run the body with the numbers of a call and others, and keep what that shows. ``wanted``: reads of which formulas
    may take the value; ``facts``: of a plain run of such a call, with the numbers of another step. ``is_branch``: the
    call went another way than those before, on which it may read more. ``constants``: those of its entry."""
    run = BodyRun()
    if call.binder.places and others_may_run():  # who would see the numbers put there
        decisions.forbid(call.values)
        return _Learned(is_enough=False)
    try:
        proof = body_run.during(run, _shared, (captured, call, decisions, wanted, facts, is_branch))
    except Exception as error:
        let_through(error)
        if run.error is not error:
            raise
        decisions.forbid(call.values)  # an error that the body raises may tell the numbers
        return _Learned(is_enough=False, is_open=True)
    if proof is not None and proof.is_open and not decisions.positions:
        return _Learned(is_enough=False, is_open=True)
    if proof is not None and proof.unplaced:
        return _Learned(is_enough=True, unplaced=proof.unplaced)
    if proof is None or not decisions.learn(proof):
        return _Learned(is_enough=None)
    found, shown = proof.computed if proof.is_enough else None, decisions.shown_for(constants)
    if constants is not None and found is not None and found.text() not in [one.text() for one in shown]:
        shown.append(found)
    call.formulas = decisions.formulas(call.values, constants)  # else a run of it would not know what was proven now
    return _Learned(is_enough=bool(proof.is_enough), is_shared=proof.is_shared)


def begins_with_reads(captured: Captured, entry: Entry, bound: Call) -> bool:
    """Put formulas in the place of what the host read in a run of this entry, where nothing else comes of it. All that
    was recorded is dropped then. False where that is not so."""
    if captured.decisions is not None or entry.has_tried_formulas or entry.phase not in ("warm", "ready"):
        return False
    entry.has_tried_formulas = True
    if captured.sizes is not None or captured.is_backward or not captured.decisions_left or entry.region is not None:
        return False
    wanted = read_by_number(entry.facts, ())
    if entry.facts is None or calls_out(entry.facts) or not wanted:
        return False
    captured.decisions_left -= 1
    return _begins_with(captured, entry, evolve(bound), (), [], wanted)


def may_take_reads(captured: Captured, entry: Entry, facts: Facts) -> bool:
    """Whether the step of an optimizer in a run with these facts is recorded like other code: operators get what
    follows from the numbers that it reads, which is known, or not tried yet. Else it runs beside recordings, as do
    steps that ask something of those numbers, or whose settings move: these would go ever new ways."""
    backend = entry.backend
    if backend is None or not facts.reads:
        return False
    if not backend.lifts_numbers or not backend.executes_recording_runs or others_may_run():
        return False
    is_plain = captured.sizes is None and not captured.is_backward and entry.region is None
    if not is_plain or captured.binder.places or captured.reads_stay or captured.optimizers.settings_move():
        return False
    candidates = captured.decisions.candidates() if captured.decisions is not None else ()
    is_like_code = not facts.host_work and not calls_out(facts) and not any(map(_gets_lists, facts.sequence))
    if not is_like_code or not read_by_number(facts, candidates):
        return False
    if candidates:
        asked = (question for one in candidates for question, _ in one.asked if is_of_read(question))
        return any(one.given for one in candidates) and all(question.operation == "raises" for question in asked)
    if entry.facts is None and len(captured.entries()) > _FIRST_KEYS:
        return False  # another key in each call, as of a counter: no recording is made to serve both
    return entry.branch_proofs < _MOST_TRIES and not entry.has_tried_formulas and captured.decisions_left > 0


def _gets_lists(operator: str) -> bool:
    """Whether it gets one number for each of many tensors: a recording has no place for those."""
    return operator.endswith("ScalarList")


def take_reads_no_more(captured: Captured) -> None:
    """What operators get of numbers that the host reads is left to a function beside the recordings from now on."""
    if not captured.reads_stay:
        captured.try_numbers_anew()
    captured.reads_stay = True
    kept: Decisions | None = captured.decisions
    if kept is not None and (kept.candidates() or not kept.positions):  # without the step the body asks something else
        captured.decisions = None


def _takes_more_places(captured: Captured, entry: Entry, bound: Call, wanted: frozenset[int]) -> bool:
    """After other answers than those before, the body leaves what formulas give in further places (``if loss < best:
    best = loss``): have these be arguments, too."""
    decisions: Decisions = captured.decisions
    if decisions.has_all_places or bound.binder.places != captured.binder.places:
        return False
    decisions.has_all_places = True  # if it fails now, it does again
    return _begins_with(captured, entry, evolve(bound), decisions.positions, [], wanted)


def proves_branch(captured: Captured, entry: Entry, bound: Call, reads: tuple[str, ...]) -> bool:
    """Prove what the body of an entry does after other answers of what it ``reads``. False where it does more, or where
    answers stand for further numbers from now on. Where those do not tell the answers, as the call was stopped before
    the last of them, another branch may have been proven after the same reads."""
    decisions: Decisions | None = captured.decisions
    if decisions is None or entry.facts is None or calls_out(entry.facts):
        return False
    tells = reads[-1].startswith(ASKED)
    if tells and reads in entry.proven_branches and (decisions.is_known(reads) or not decisions.candidates()):
        return True
    if decisions.calls_foreign:
        return False
    entry.branch_proofs += 1
    if entry.branch_proofs > 2 * MOST_BRANCHES:
        return False
    wanted = frozenset(number for one in decisions.candidates() for number in one.taken)
    learned = _learned(captured, bound, decisions, wanted, is_branch=True, constants=entry.constants)
    if learned.unplaced:
        _takes_more_places(captured, entry, bound, wanted)
    is_enough = learned.is_enough is True and not learned.unplaced
    if is_enough:
        entry.proven_branches.add(reads)
    return is_enough


def _varying(
    captured: Captured, entry: Entry, values: Values, kept: Decisions | None
) -> tuple[tuple[int, ...], Values, list[InputPlace], Facts] | None:
    """Positions of the plain numbers in which alone the key differs from that of an entry that can be recorded, the
    values with the numbers of that one, and places in Python state whose numbers are the last of those values."""
    entries = captured.entries()
    for other in entries[::-1] if len(entries) <= _MOST_ENTRIES else ():
        if other is entry or other.phase not in ("warm", "ready") or other.region is not None or other.facts is None:
            continue
        if calls_out(other.facts) or len(other.key) != len(entry.key):
            continue
        ours, theirs = entry.key[1], other.key[1]
        if len(ours) != len(theirs):
            continue
        differing = [at for at, (part, then) in enumerate(zip(ours, theirs, strict=True)) if part != then]
        if not all(are_numbers(ours[at], theirs[at]) and type(values[at]) in _PLAIN for at in differing):
            continue  # before anything is looked up: most keys differ in shapes
        in_state = _differing_places(captured, values, entry.key, other)
        if in_state is None or not (differing or in_state):
            continue
        places, in_places = [place for place, _ in in_state], [number for _, number in in_state]
        watched = (*with_numbers(values, differing, [number_of(theirs[at]) for at in differing]), *in_places)
        differing += range(len(values), len(watched))
        positions = tuple(sorted({*differing, *(kept.positions if kept is not None else ())}))
        return positions, watched, places, other.facts
    return None


def _differing_places(
    captured: Captured, values: Values, key: Any, entry: Entry
) -> list[tuple[InputPlace, Number]] | None:  # fmt: skip
    """Places in Python state in whose numbers the key differs from that of an entry, with the entry's numbers. None
    where it differs in something else, or where other threads would see the numbers that are put there."""
    entry_key, only_kept = entry.key, _only_kept(entry.facts)
    parts = [at for at in range(2, len(key)) if key[at] != entry_key[at]]
    if key[0] != entry_key[0] or not {NAMED, SETTINGS}.issuperset(parts):
        return None
    differing: list[tuple[InputPlace, Number]] = []
    known = {place.key() for place in captured.binder.places}
    for at in parts:
        if len(key[at]) != len(entry_key[at]):
            return None
        for number, (part, then) in enumerate(zip(key[at], entry_key[at], strict=True)):
            if part == then:
                continue
            places = places_of_part(captured, values, at, number, (part, then), are_numbers)
            if places is None:
                return None
            new = [(place, value) for place, value in places if place.key() not in known]
            differing += [(place, value) for place, value in new if tail_of(place.path) not in only_kept]
    if differing and (others_may_run() or len(captured.binder.places) + len(differing) > _MOST_PLACES):
        return None
    reads_values = bool(read_by_number(entry.facts, ()))  # most likely the body sets them by what it reads
    if differing and not reads_values and sets_anew(entry, [place for place, _ in differing]):
        return None
    return differing


def _only_kept(facts: Facts | None) -> set[tuple[str, ...]]:
    """Members of dicts that the body only adds to, or gives numbers that the host read: nothing depends on them."""
    effects = facts.effects if facts is not None else ()
    return {tail_of(effect.path) for effect in effects if effect.kind == "count" or READ_ANEW in effect.after}


# ------------------------------------------------------------------------------------------------------------ the proof


@frozen(eq=False)
class _Seen:
    """What an undone run showed."""

    facts: Facts
    noting: Noting
    is_enough: bool
    """Whether the numbers answer questions, and formulas have them, and do nothing else, as far as it shows."""
    amounts: dict[int, int]
    """What it added to numbers in Python state, by position."""
    reads: NotedReads | None = None
    changed: frozenset[int] = frozenset()
    """Places that it changed."""
    codes: frozenset[types.CodeType] = frozenset()
    """The code that ran."""

    def is_like(self, other: _Seen) -> bool:
        """They did the same."""
        return compared(self.facts) == compared(other.facts) and self._left_like(other)

    def given_in(self, other: _Seen, own: Numbers, others: Numbers) -> list[Formula] | None:
        """The formulas of what operators got, where the runs did the same, but that these are other numbers in each,
        and what was made of them. None where they did not. ``own``: the numbers of this run."""
        numbers = self.numbers(own)
        try:
            values = [map(repr, _values(numbers.values(), given, {})) for given in (own, others)]
            texts = dict(zip(numbers, zip(*values, strict=True), strict=True))
        except (ArithmeticError, ValueError, TypeError):
            return None
        mine, theirs = self.facts, other.facts
        if _shapes(mine) != _shapes(theirs) or len(mine.scalars) != len(theirs.scalars):
            return None
        is_like = functools.partial(same_but, {*texts.values()})
        if not all(map(is_like, mine.scalars, theirs.scalars)) or not self._left_like(other):
            return None
        differing = differing_parts(mine.scalars, theirs.scalars)
        return [formula for text, formula in numbers.items() if texts[text] in differing]

    def numbers(self, own: Numbers) -> dict[str, Formula]:
        """All that Python computed which is a number, and no text, by the text of the formula."""
        formulas = {formula.text(): formula for formula in self.noting.formulas.values()}
        values = _values(formulas.values(), own, {})
        return {text: one for (text, one), value in zip(formulas.items(), values, strict=True) if type(value) in _PLAIN}

    def _left_like(self, other: _Seen) -> bool:
        alike = self.amounts == other.amounts and self.changed == other.changed
        return alike and self._texts() == other._texts()

    def _texts(self) -> Any:
        return None if self.reads is None or self.reads.computed is None else self.reads.computed.text()


def compared(facts: Facts) -> tuple[Any, ...]:
    """Equal where two runs did the same."""
    outputs = [(one.compared, one.tensor) for one in facts.outputs]
    draws = [(one.generator, one.op, one.count) for one in facts.draws]
    effects = [one.compared for one in facts.effects]
    return facts.sequence, facts.scalars, facts.reads, outputs, effects, draws, facts.num_ops


def _shapes(facts: Facts) -> tuple[Any, ...]:
    """As ``compared``, without what tensors hold."""
    outputs = [(one.compared, one.tensor) for one in facts.outputs]
    draws = [(one.generator, one.op, one.count) for one in facts.draws]
    effects = [(one.path, one.kind) for one in facts.effects]
    return facts.sequence, facts.reads, outputs, effects, draws, facts.num_ops


@frozen(eq=False)
class _Proof:
    """What the body asks of the numbers of a call, with the answers, and whether nothing else comes of them than
    amounts that are added, and formulas."""

    asked: dict[Question, Any]
    amounts: Mapping[int, int]
    is_enough: bool
    computed: Computed | None = None
    unplaced: Sequence[Change] = ()
    changed: frozenset[int] = frozenset()
    """Places that change."""
    compared: tuple[str, ...] = ()
    """See ``read_and_compared``."""
    is_open: bool = False
    """No other numbers with the same answers were found, as of an infinite one, or Python raised an error for them."""
    shown: Shown | None = None
    """For calls of other sizes."""
    is_shared: bool = False
    """It takes what was shown for another size."""


@frozen(eq=False)
class Shown:
    """What a run with other numbers did, in a proof that holds."""

    wanted: frozenset[int]
    numbers: Numbers
    form: tuple[Any, ...]
    """See ``_form``."""
    codes: frozenset[types.CodeType]
    given: frozenset[str]
    """Formulas that operators got, as text."""


def _form(seen: _Seen, numbers: Numbers) -> tuple[Any, ...] | None:
    """What a run with these numbers has in common with one of another size that does the same with them: what was
    computed and asked, the operators, and where each of them got a value that a formula has. None where that is not
    told, as the body made tensors of numbers."""
    formulas, first = [*seen.noting.formulas.values()], dict[str, int]()
    try:
        for at, value in enumerate(_values(formulas, numbers, {})):
            first.setdefault(repr(value), at)
    except (ArithmeticError, ValueError, TypeError):
        return None
    places = list[tuple[int, int, int]]()
    for operator, several in enumerate(seen.facts.scalars):
        if any(not text.partition("=")[1] for text in several):
            return None
        parts = (part.strip("[]() ") for text in several for part in text.partition("=")[2].split(","))
        places += [(operator, at, first[part]) for at, part in enumerate(parts) if part in first]
    facts, asked = seen.facts, tuple((question.text, answer) for question, answer in seen.noting.questions.items())
    draws = tuple((one.generator, one.op) for one in facts.draws)
    effects = tuple((one.path, one.kind) for one in facts.effects)
    left = repr((seen.amounts, sorted(seen.changed), seen._texts()))
    computed = tuple(one.text() for one in formulas)
    return computed, asked, tuple(places), facts.sequence, facts.reads, draws, effects, left


def _shared(
    captured: Captured, call: Call, decisions: Decisions, wanted: frozenset[int], facts: Facts | None, is_branch: bool
) -> _Proof | None:  # fmt: skip
    """A proof for a call of another size takes one run where the same code does the same with numbers; else it is made
    anew."""
    own = decisions.own(call.values)
    if own is not None and facts is not None and (shown := decisions.shown_like(own, wanted)) is not None:
        proof = _shown_again(captured, call, decisions, shown, own, facts)
        if proof is not None:
            return proof
    return _proof(captured, call, decisions, wanted, is_branch)


def _shown_again(
    captured: Captured, call: Call, decisions: Decisions, shown: Shown, own: Sequence[Number], facts: Facts
) -> _Proof | None:  # fmt: skip
    """Run the body with the other numbers of an earlier proof. It has to do the same as there, at the same places, and
    as the plain run of this call but for what formulas give. None where it does not."""
    others = [shown.numbers[at] for at in range(len(own))]
    given = {number: shown.numbers["read", number] for number in shown.wanted}
    try:
        seen = _seen(captured, call, decisions.positions, others, shown.wanted, given)
    except Exception as error:
        let_through(error)
        run = body_run.current()
        if run is None or run.error is not error:
            raise
        return None
    computed = None if seen.reads is None else seen.reads.computed
    if not seen.is_enough or not seen.codes <= shown.codes or _form(seen, shown.numbers) != shown.form:
        return None
    if seen.reads is not None and (seen.reads.unplaced or frozenset(seen.reads.read) != shown.wanted):
        return None
    now: dict[Variable, Any] = dict(enumerate(own))
    now |= {("read", number): value for number, value in (seen.reads.own if seen.reads is not None else {}).items()}
    formulas = [*seen.noting.not_told().values()]
    try:
        values = _values(formulas, now, {}), _values(formulas, shown.numbers, {})
    except (ArithmeticError, ValueError, TypeError):
        return None
    if not all(map(_differ, *values)) or not _floats_ask_no_more(captured, call, decisions, seen, others):
        return None
    expected = seen.facts
    if computed is not None:
        every = {one.text(): one for one in seen.noting.formulas.values()}
        computed = evolve(computed, given=tuple([every[text] for text in every if text in shown.given]))
        expected = evolve(expected, scalars=tuple(without_given(computed, expected.scalars, shown.numbers)))
    if compared(facts) != compared(expected):
        return None
    asked = dict(itertools.takewhile(lambda one: not is_of_read(one[0]), seen.noting.questions.items()))
    others_read = read_and_compared(seen.facts)
    return _Proof(
        asked, seen.amounts, is_enough=True, computed=computed, changed=seen.changed, compared=others_read,
        is_shared=True,
    )  # fmt: skip


def _proof(
    captured: Captured, call: Call, decisions: Decisions, wanted: frozenset[int], is_branch: bool
) -> _Proof | None:  # fmt: skip
    """Run the body. None where it asks nothing, and formulas have nothing."""
    own = decisions.own(call.values)
    if own is None:
        return None
    first = _first_seen(captured, call, decisions, own, wanted, is_branch=is_branch)
    if first is None:
        return None
    asked = dict(itertools.takewhile(lambda one: not is_of_read(one[0]), first.noting.questions.items()))
    computed = None if first.reads is None else first.reads.computed
    if first.noting.has_raised and not asked:
        return _Proof(asked, {}, is_enough=False, is_open=True)
    if not first.is_enough or not (asked or computed is not None):
        return _Proof(asked, {}, is_enough=False) if asked else None
    if first.reads is not None and first.reads.unplaced:
        return _Proof(asked, {}, is_enough=False, unplaced=first.reads.unplaced)
    after_others = _left_after_others(captured, call, decisions, first, own)
    if after_others is None or not _floats_ask_no_more(captured, call, decisions, first, own):
        return _Proof(asked, {}, is_enough=False)
    left, given, shown = after_others
    if given and computed is not None:
        computed = evolve(computed, given=tuple(given))
    added, others = Decisions(decisions.positions, decisions.kinds), read_and_compared(first.facts)
    added.learn(_Proof(asked, first.amounts, is_enough=True, computed=computed, changed=first.changed))
    plainly = evolve(call)
    plainly.is_tried = True
    plainly.amounts, plainly.formulas = added.amounts(plainly), added.formulas(plainly.values)
    plain = watched_with(captured, plainly, {})[1].facts
    expected = first.facts
    if computed is not None and first.reads is not None:
        numbers: dict[Variable, Any] = dict(enumerate(own))
        numbers |= {("read", number): value for number, value in first.reads.read.items()}
        scalars = without_given(computed, expected.scalars, numbers)
        expected = evolve(expected, scalars=tuple(scalars))
    is_enough = not left and compared(plain) == compared(expected)
    changed = first.changed
    shown = shown if is_enough else None
    return _Proof(
        asked, first.amounts, is_enough, computed, changed=changed, compared=others, is_open=bool(left), shown=shown
    )


def _floats_ask_no_more(
    captured: Captured, call: Call, decisions: Decisions, first: _Seen, own: Sequence[Number]
) -> bool:  # fmt: skip
    """A float on the left of a whole number (``0.25 > n``, ``0.1 * n``) asks it nothing, and no other whole number with
    the same answers need show it. Nor need one show what follows from an index or a length (``len(range(n))``), which
    is a plain number. So a run has numbers that such a float asks, computes and asks the same, and takes none for an
    index, but one that the answers tell."""
    read = {} if first.reads is None else first.reads.read
    if not any(type(value) is int for value in (*own, *read.values())):
        return True
    try:
        seen = _seen(captured, call, decisions.positions, own, frozenset(read), read, has_wholes=True)
    except Exception as error:
        let_through(error)
        run = body_run.current()
        if run is None or run.error is not error:
            raise
        return False  # the body takes no such numbers
    not_told = seen.noting.not_told()
    if any(index.text() in not_told for index in seen.noting.indices):
        return False
    return not seen.noting.is_read and first.noting.texts() == seen.noting.texts()


def _first_seen(
    captured: Captured, call: Call, decisions: Decisions, own: Sequence[Number], wanted: frozenset[int], *,
    is_branch: bool,
) -> _Seen | None:  # fmt: skip
    """A run with the numbers of the call and those that it reads by ``item()``: a branch may read more than what is
    known so far, as where the step of a further optimizer is in it. None where there are no numbers."""
    may_be_more = is_branch
    while own or wanted:
        seen = _seen(captured, call, decisions.positions, own, wanted)
        decisions.calls_foreign = decisions.calls_foreign or seen.facts.calls_foreign
        found = frozenset() if seen.reads is None else frozenset(seen.reads.read)
        if may_be_more:
            found |= read_by_number(seen.facts, ())
            may_be_more = False
        if found == wanted:
            return seen
        wanted = found
    return None


def _left_after_others(
    captured: Captured, call: Call, decisions: Decisions, first: _Seen, own: Sequence[Number]
) -> tuple[dict[str, Formula], Sequence[Formula], Shown | None] | None:  # fmt: skip
    """Formulas that had the same value in all runs, after runs with other numbers, and those that operators got; None
    where a run did more. Where one such run told all, it is ``Shown``."""
    read = {} if first.reads is None else first.reads.read
    wanted = frozenset(read)
    variables: list[Variable] = [*range(len(own)), *[("read", number) for number in read]]
    before, left = dict(zip(variables, (*own, *read.values()), strict=True)), first.noting.not_told()
    may_give, given_to_operators = bool(read) and _may_give(captured, call), dict[str, Formula]()
    runs = list[tuple[Numbers, _Seen]]()
    for others in _like(first.noting, before):
        values = _values(left.values(), before, {}), _values(left.values(), others, {})
        differing = {text for text, *both in zip(left, *values, strict=True) if _differ(*both)}
        if left and not differing:
            continue
        given = {number: others["read", number] for number in wanted}
        second = _seen(captured, call, decisions.positions, [others[at] for at in range(len(own))], wanted, given)
        if not second.is_enough or second.noting.questions != first.noting.questions:
            return None
        runs.append((others, second))
        if given_to_operators or not second.is_like(first):
            found = first.given_in(second, before, others) if may_give else None
            if found is None:
                return None
            given_to_operators |= {formula.text(): formula for formula in found}
        left = {text: formula for text, formula in left.items() if text not in differing}
        if not left:
            break
    shown, form = None, _form(runs[0][1], runs[0][0]) if len(runs) == 1 else None
    if form is not None:
        shown = Shown(wanted, runs[0][0], form, runs[0][1].codes, frozenset(given_to_operators))
    return left, [*given_to_operators.values()], shown


def _may_give(captured: Captured, call: Call) -> bool:
    """Whether recordings may have numbers that are read in each replay among what operators get. Where a schedule moves
    an optimizer that reads numbers, both are to be islands, and none of their numbers an input."""
    if call.binder.places and captured.optimizers.ask_host() and captured.optimizers.are_scheduled():
        return False
    engines = {entry.backend for entry in captured.entries() if entry.backend is not None}
    return all(one.lifts_numbers and one.executes_recording_runs for one in engines)


def _seen(
    captured: Captured, call: Call, positions: Sequence[int], numbers: Sequence[Number], wanted: frozenset[int],
    given: Mapping[int, Any] | None = None, *, has_wholes: bool = False,
) -> _Seen:  # fmt: skip
    """Watch the body with these numbers, and undo it. ``wanted``: reads that are noted; ``given``: what it gets."""
    is_alone = not others_may_run()
    noting = Noting(asks=True, keeps=bool(wanted), has_wholes=has_wholes)
    reads = NotedReads(noting, wanted, tuple(positions), {} if given is None else given) if wanted else None
    with_notes = evolve(call, values=with_numbers(call.values, positions, noting.begin(numbers)))
    amounts = dict[int, int]()
    with_notes.amounts = noted_amounts(with_notes, noting, numbers, positions, amounts)
    with_notes.formulas, with_notes.is_tried = reads, True
    run = functools.partial(watched_with, captured, with_notes, dict(zip(positions, numbers, strict=True)))
    watched, described = noting_math(noting, run) if is_alone else run()
    facts = described.facts
    others = noting.is_read or facts.gradients or calls_out(facts)
    others = others or reads_in_c(watched.ran, but=math if is_alone else None)
    raw = facts if reads is None or reads.computed is None else evolve(facts, reads=reads.computed.reads)
    others = others or len(raw.reads) != len(raw.breaks) or not TRUTHS.issuperset(read_and_compared(raw))
    others = others or any(effect.kind in ("python", "container", "call") for effect in facts.effects)
    left = [leaf.value for effect in described.effects for leaf in effect.leaves]
    left += [leaf.value for leaf in described.outputs]
    if reads is None:
        left += [change.after for change in watched.changed if change.amount is None]
    others = others or (reads is not None and facts.calls_foreign)
    others = others or asks_for_classes(watched.ran)
    others = others or any(map(holds_noted, left)) or watched.watch.left_trace or (reads is not None and reads.is_lost)
    changed = [number_of_place(call.binder.places, change.source) for change in watched.changed]
    places = frozenset([at for at in changed if at is not None])
    return _Seen(facts, noting, not others, amounts, reads, places, frozenset(watched.ran.codes))


def calls_out(facts: Facts) -> bool:
    """An undone run would wait for other ranks, or call islands, of which not all can be undone."""
    return bool(facts.collectives) or not all(one.is_undoable for one in facts.islands)


TRUTHS = frozenset({"", "True", "False"})
"""What is read of other tensors where numbers get formulas or answers: after each of the two it is proven what the body
does. Other values may never come again."""


def read_and_compared(facts: Facts) -> tuple[str, ...]:
    """The values that a run read and that replays compare, each at its place; empty where there are none."""
    islands = {at for at, read in enumerate(facts.breaks) if read.kind == "island"}
    texts = ["" if text.startswith(RETURNED) or at in islands else text for at, text in enumerate(facts.reads)]
    return tuple(texts) if any(texts) else ()


Numbers = Mapping[Variable, Any]


def _values(formulas: Iterable[Formula], numbers: Numbers, known: dict[Formula, Any]) -> list[Any]:
    """Their values for these numbers. ``known``: see ``Formula.value``."""
    return [formula.value(numbers, known) for formula in formulas]


def _differ(value: Any, other: Any) -> bool:
    return bool(value != other) and not same(value, other)  # NaN shows nothing


def _like(noting: Noting, own: Numbers) -> Iterator[Numbers]:
    """Other numbers with the same answers, first those by which most formulas differ."""
    candidates: list[tuple[int, Numbers]] = []
    left = noting.not_told().values()
    if not noting.questions:
        yield from _near(own, left)
    tried = min(_TRIED, _MOST_VALUES // (len(left) + 1))  # a step of Adam has some formulas a parameter
    values = _values(left, own, {})
    for numbers in itertools.islice(others_than([*own.values()], noting.formulas.values()), tried):
        others: Numbers = dict(zip(own, numbers, strict=True))
        known = dict[Formula, Any]()
        try:
            of_others = _values(left, others, known)
            alike = [*map(type, of_others)] == [*map(type, values)]
            if not alike or any(asked.answer(others, known) != answer for asked, answer in noting.questions.items()):
                continue
        except (ArithmeticError, ValueError, TypeError):
            continue
        differing = sum(map(_differ, values, of_others))
        if differing == len(values):  # no others come before these
            yield others
        else:
            candidates.append((differing, others))
    for _, others in sorted(candidates, key=lambda candidate: -candidate[0]):
        yield others


def _near(own: Numbers, formulas: Iterable[Formula]) -> Iterator[Numbers]:
    """Other numbers where nothing is asked of them, of the same signs: no two differ from their own by as much."""
    for factor, shift in ((1.375, 3), (0.59375, 1013)):
        others: Numbers = {
            variable: number + shift + at if type(number) is int else number * (factor + at / 512)
            for at, (variable, number) in enumerate(own.items())
        }
        try:
            if [*map(type, _values(formulas, others, {}))] == [*map(type, _values(formulas, own, {}))]:
                yield others
        except (ArithmeticError, ValueError, TypeError):
            continue
