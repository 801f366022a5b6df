"""Decisions: arguments that are plain numbers of which the body only asks something, as ``step % 4 == 0`` does.

A number is a part of the key. A step that counts up is another key in each call, though the body does one of two
things. So the key has the answers in its place, where this was found out in runs that leave no trace, with a caller's
number and with others that give the same answers:

* the number notes what Python code does with it (``noted_numbers``): it is compared, and what is computed of it is, and
  nothing else comes of it: no result, nothing in Python state, and no text has it;
* all that operators got, what the body returned and what it left are equal, bit for bit, in all these runs. Each number
  that is computed on the way is another one in one of them, but for one that its answer tells (``step % 4 == 0``);
* the plain run does the same.

Which questions are asked may follow from earlier answers, so they are a tree. It is proven for each entry, between its
watched run and its recording, as only a watched run shows that another one can be undone; and again when its recordings
are dropped. Where more comes of the numbers after some answers (``if step % 10 == 0: print(step)``), calls with those
answers run eagerly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from capture.core.facts import Facts
from capture.engines.base import Number
from capture.key import pytree
from capture.observe.returned_value import RETURNED
from capture.runtime import planning
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.noted_numbers import Formula, Noting, Question, holds_noted
from capture.runtime.numbers import number_of, reads_in_c, with_numbers
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call

_PLAIN = (int, float)
_MOST_LEAVES = 12  # ways that the answers lead to
_MOST_ENTRIES = 64  # that are searched for one that has another number
_FAR = 1013  # as an index it raises
_TRIED = 4096


@define(eq=False)
class _Asked:
    """A question, and what follows each answer: the next one; True where nothing else comes of the numbers; False where
    the numbers themselves stay in the key."""

    question: Question
    after: dict[Any, _Asked | bool] = field(factory=dict)


@define(eq=False)
class Decisions:
    """The numbers at some positions among the arguments, and what the body asks of them."""

    positions: tuple[int, ...]
    kinds: tuple[type, ...]
    _first: _Asked | None = None
    _count: int = 0
    _standing: dict[tuple[Any, ...], tuple[Number, ...]] = field(factory=dict)
    """By answers, the numbers of one call that gave them."""

    def own(self, values: Values) -> list[Number] | None:
        """The numbers of a call; None where they are of other types."""
        found = [values[at] for at in self.positions]
        return found if tuple(map(type, found)) == self.kinds else None

    def parts(self, values: Values) -> Mapping[int, Any]:
        """By position, what the key has in the place of numbers."""
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
            at = at.after.get(answer)  # type: ignore[assignment]
        return tuple(answers), at

    def forbids(self, values: Values) -> bool:
        """After the answers of these numbers more comes of them."""
        return self.own(values) is not None and not self.parts(values)

    def standing(self, values: Values) -> Values:
        """These values, with numbers that are the same for all calls with the same answers: for fast paths, which
        compare numbers."""
        own = self.own(values)
        answers, is_enough = self._walked(own) if own is not None else ((), False)
        numbers = self._standing.setdefault(answers, tuple(own)) if own is not None and is_enough else None
        return values if numbers is None else with_numbers(values, self.positions, numbers)

    def learn(self, asked: Mapping[Question, Any], *, is_enough: bool) -> bool:
        """Keep what a run showed. False where it asked something else than an earlier one after the same answers."""
        questions = list(asked.items())
        if not questions:
            return False
        self._first = self._first or _Asked(questions[0][0])
        at: _Asked | bool | None = self._first
        for number, (question, answer) in enumerate(questions):
            if not isinstance(at, _Asked) or at.question != question:
                return False
            is_last = number + 1 == len(questions)
            following = is_enough if is_last else _Asked(questions[number + 1][0])
            known = at.after.setdefault(answer, following)
            if is_last:
                self._count += known is following
                if isinstance(known, _Asked):
                    return False
                at.after[answer] = is_enough
            at = known
        return True

    def forbid(self, values: Values) -> None:
        """More comes of the numbers after these answers."""
        own, at = self.own(values), self._first
        while own is not None and isinstance(at, _Asked):
            answer = at.question.answer(own)
            following = at.after.get(answer)
            if not isinstance(following, _Asked):
                at.after[answer] = False
                self._count += following is None
                return
            at = following


# ----------------------------------------------------------------------------------------------------- when it is found


def begins(captured: Captured, entry: Entry, bound: Call) -> bool:
    """A new key differs from a known one in numbers alone, and of those only answers count: all that was recorded is
    dropped, and the key has other parts from now on."""
    known: Decisions | None = captured.decisions
    if captured.sizes is not None or captured.is_backward:
        return False
    found = _varying(captured, entry, bound.values, known)
    if found is None:
        return False
    captured.decisions_left -= 1
    positions, watched = found
    decisions = Decisions(positions, tuple(type(watched[at]) for at in positions))
    call = captured.call(watched, bound.leaves)
    found_out = _learned(captured, call, decisions)
    if found_out is None:
        captured.decisions_left = 0  # the code is the same with other numbers
    if not found_out:
        return False
    captured.decisions = decisions
    captured.log.add("drop", "answers of the body stand for numbers from now on")
    captured.retire()
    captured.budget.start_anew()
    return True


def hold(captured: Captured, entry: Entry, bound: Call) -> bool:
    """Before the first recording of an entry: what its key leaves out of numbers does not count. False where it does,
    and the key is another one now."""
    decisions: Decisions | None = captured.decisions
    if decisions is None or entry.asks_no_more or not decisions.parts(bound.values):
        return True
    if entry.facts is None or entry.facts.islands or entry.facts.collectives:
        decisions.forbid(bound.values)  # an undone run would call those, or wait for other ranks
        return False
    found = _learned(captured, bound, decisions)
    entry.asks_no_more = found is True
    if found is None:
        captured.decisions, captured.decisions_left = None, 0
        captured.log.add("drop", "numbers are part of the key again")
        captured.retire()
    return found is True


def _learned(captured: Captured, call: Call, decisions: Decisions) -> bool | None:
    """Run the body with the numbers of a call and others, and keep what that shows: whether answers are enough after
    those of this call. None where it asks nothing, or something else than before."""
    run = BodyRun()
    try:
        found = body_run.during(run, _proof, (captured, call, decisions))
    except Exception as error:
        if run.error is not error:
            raise
        decisions.forbid(call.values)  # an error that the body raises may tell the numbers
        return False
    if found is None or not decisions.learn(found[0], is_enough=found[1]):
        return None
    return bool(found[1])


def _varying(
    captured: Captured, entry: Entry, values: Values, known: Decisions | None
) -> tuple[tuple[int, ...], Values] | None:
    """Positions of the plain numbers in which alone the key differs from that of an entry that can be recorded, and
    the values with the numbers of that one."""
    entries = captured.entries()
    first_place = len(captured.binder.names) - len(captured.binder.places)
    for other in entries[::-1] if len(entries) <= _MOST_ENTRIES else ():
        if other is entry or other.phase not in ("warm", "ready") or other.region is not None or other.facts is None:
            continue
        if other.facts.islands or other.facts.collectives or len(other.key) != len(entry.key):
            continue
        ours, theirs = entry.key[1], other.key[1]
        if any(entry.key[at] != other.key[at] for at in range(len(entry.key)) if at != 1) or len(ours) != len(theirs):
            continue
        found = [at for at, (one, two) in enumerate(zip(ours, theirs, strict=True)) if one != two]
        if found and max(found) < first_place and all(_are_numbers(ours[at], theirs[at], values[at]) for at in found):
            watched = with_numbers(values, found, [number_of(theirs[at]) for at in found])
            return tuple(sorted({*found, *(known.positions if known is not None else ())})), watched
    return None


def _are_numbers(one: Any, other: Any, value: Any) -> bool:
    parts = all(type(part) is tuple and len(part) == 2 and part[0] in _PLAIN for part in (one, other))
    return parts and type(value) in _PLAIN and one[0] is other[0] is type(value)


# ------------------------------------------------------------------------------------------------------------ the proof


@frozen(eq=False)
class _Seen:
    """What an undone run showed."""

    facts: Facts
    noting: Noting
    is_enough: bool
    """As far as it shows, the numbers answer questions and nothing else."""

    def is_like(self, other: _Seen) -> bool:
        """They did the same."""
        return _compared(self.facts) == _compared(other.facts)


def _compared(facts: Facts) -> tuple[Any, ...]:
    outputs = [(one.compared, one.tensor) for one in facts.outputs]
    draws = [(one.generator, one.op, one.count) for one in facts.draws]
    effects = [one.compared for one in facts.effects]
    return facts.sequence, facts.scalars, facts.reads, outputs, effects, draws, facts.num_ops


def _proof(captured: Captured, call: Call, decisions: Decisions) -> tuple[dict[Question, Any], bool] | None:
    """What the body asks of the numbers of a call, with the answers, and whether nothing else comes of them. None where
    it asks nothing."""
    own = decisions.own(call.values)
    if own is None:
        return None
    first = _seen(captured, call, decisions.positions, own)
    asked, left = first.noting.questions, _not_told(first.noting)
    if not asked or not first.is_enough:
        return (asked, False) if asked else None
    for others in _like(first.noting, own):
        told = {text for text, formula in left.items() if _differs(formula, own, others)}
        if left and not told:
            continue
        second = _seen(captured, call, decisions.positions, others)
        if not second.is_enough or second.noting.questions != asked or not second.is_like(first):
            return asked, False
        left = {text: formula for text, formula in left.items() if text not in told}
        if not left:
            break
    plain = planning.watch_undone(captured, call, counts=False)[1].facts
    return asked, not left and _compared(plain) == _compared(first.facts)


def _seen(captured: Captured, call: Call, positions: Sequence[int], numbers: Sequence[Number]) -> _Seen:
    """Watch the body with these numbers, and undo it."""
    noting = Noting(asks=True)
    noted = evolve(call, values=with_numbers(call.values, positions, noting.begin(numbers)))
    watched, described = planning.watch_undone(captured, noted, counts=False)
    facts = described.facts
    others = noting.is_read or facts.gradients or facts.islands or facts.collectives or reads_in_c(watched.ran)
    # after another value that is read the body may do more with them
    others = others or any(not told.startswith(RETURNED) for told in facts.reads)
    others = others or any(one.kind in ("python", "container", "call") for one in facts.effects)
    left = [leaf.value for effect in described.effects for leaf in effect.leaves]
    left += [leaf for _, leaf in pytree.result_leaves(watched.result)]
    others = others or any(map(holds_noted, left)) or any(holds_noted(one.after) for one in watched.changed)
    return _Seen(facts, noting, not others)


def _not_told(noting: Noting) -> dict[str, Formula]:
    """Formulas whose value no answer tells. C code might use them unnoticed, as an index."""
    told = set[str]()
    for question, answer in noting.questions.items():
        is_equal = (question.operation, answer) in (("eq", True), ("ne", False), ("bool", False))
        if question.operation == "value" or is_equal:
            formulas = [one for one in question.operands if type(one) is Formula]
            told |= {one.text() for one in formulas} if len(formulas) == 1 else set()
    return {text: one for one in noting.formulas.values() if (text := one.text()) not in told}


def _differs(formula: Formula, own: Sequence[Number], others: Sequence[Number]) -> bool:
    return formula.value(own) != formula.value(others)


def _like(noting: Noting, own: Sequence[Number]) -> Iterator[list[Number]]:
    """Other numbers with the same answers, first those by which most formulas differ."""
    found: list[tuple[int, list[Number]]] = []
    left = _not_told(noting).values()
    for others in itertools.islice(_others(noting, own), _TRIED):
        try:
            if all(question.answer(others) == answer for question, answer in noting.questions.items()):
                found.append((sum(_differs(one, own, others) for one in left), others))
        except (ArithmeticError, ValueError, TypeError):
            continue
    for _, others in sorted(found, key=lambda one: -one[0]):
        yield others


def _others(noting: Noting, own: Sequence[Number]) -> Iterator[list[Number]]:
    """Far ones first, as they are no indices, then those nearby. What is divided by a number may have to keep the
    remainder."""
    divisors = [one.operands[1] for one in noting.formulas.values() if one.operation in ("mod", "floordiv")]
    period = math.lcm(*[one for one in divisors if type(one) is int and 0 < one < _FAR**2]) or 1
    for far, near in itertools.product((-_FAR, _FAR, 0, -1, 1, 2, 3), range(-8, 9)):
        shift = far * period + near
        if shift:
            yield [one + shift * (at + 1) if type(one) is int else one + shift / 7 for at, one in enumerate(own)]
            yield [one + shift if type(one) is int else one * (1 + shift / 64) for one in own]
            yield from ([one + shift * (at == only) for at, one in enumerate(own)] for only in range(len(own)))
