"""Numbers: arguments of a captured function that are plain numbers, another one in each call, as a learning rate is.

A number is a part of the key, so each value is a recording of its own. Where only operators get it, as it is or as
Python's arithmetic makes another one of it, one recording serves all values: before a replay the numbers are put where
the engine has them. That is found out, not declared, when a second value comes:

* the body runs with a number that notes what Python code does with it (``noted_numbers``): a text of it and all else
  that reads it keep it in the key, as do functions in C that would read it unnoticed (but for ``math``:
  ``noted_math``). For a whole number, which may be an index or a length, it runs again, with one that is none, and
  with one that a float on its left asks;
* what it compares them with is asked again before each replay, as in ``min(0.99, (1 + t) / (10 + t))``: this recording
  serves the numbers with the same answers, and others are shown by a run with such ones. Numbers of which the body only
  asks something are left to ``decisions``;
* what the body leaves in Python state, or returns, of such a number has a formula (``formulas``), which a replay
  computes again: ``self.t += self.dt``;
* recordings differ in these numbers alone (``engines.cpu.lifting``, ``engines.cuda.lifting``);
* a replay with other numbers put there equals the body, bit for bit: in the first such call, and in the fourth,
  sixteenth ... one.

Values for which there are kernels of their own, or for which code above operators takes another way, stay in the key.
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
import operator
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field
from typing_extensions import override

from capture.core.data import define, frozen
from capture.core.facts import Facts
from capture.core.interrupts import let_through
from capture.engines.base import LiftedNumbers, Number
from capture.key.argument_numbers import are_numbers
from capture.key.exact import float_of
from capture.key.input_places import InputPlace, number_place
from capture.key.modes import Here
from capture.key.name_uses import updated_names
from capture.key.packages import package_behind
from capture.native import MISS
from capture.observe.computed import Computed, same
from capture.observe.returned_value import go_one_way
from capture.runtime.buckets import Count, Values
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry, Family
from capture.runtime.fast_path import GoesOn, Shortcuts
from capture.runtime.formulas import NotedReads, asks_for_classes
from capture.runtime.noted_math import noting_math
from capture.runtime.noted_numbers import Formula, Noting, Question, holds_noted, may_vary, others_than
from capture.runtime.noted_runs import noted_amounts, watched_with
from capture.runtime.payoff import clock_of
from capture.runtime.verify import NO_MEMORY, Comparison, NoMemoryError, State, Verified
from capture.state import body_run
from capture.state.amounts import number_of_place
from capture.state.call import Call
from capture.state.code_run import CodeRun
from capture.state.effects import uses_of_names
from capture.state.snapshot import Change
from capture.torch_private.threads import others_may_run
from capture.tree.node import Node
from capture.tree.tree import Tree

_MOST_FAMILIES = 32  # keys that are searched for a similar call
_NAMING = frozenset(dis.hasname)
_READ_IN_C = frozenset({"math", "cmath", "numpy", "decimal", "fractions", "struct", "random", "statistics", "operator",
                        "scipy", "json", "pickle", "marshal", "array", "ctypes"})  # fmt: skip
"""Modules whose functions in C read a number without calling a method of it."""
_CONVERSION = re.compile(r"%(\(.*?\))?[-+ #0]*[0-9*]*(\.[0-9*]*)?[diouxXeEfFgGc]")


def reads_in_c(ran: CodeRun, *, but: types.ModuleType | None = None) -> bool:
    """Code that ran names something that may read a number unnoticed, or makes a text of it by ``%``. ``but``: a module
    that is no such thing."""
    return any(map(_formats, ran.codes)) or any(
        _reads(name, value)
        for code, scopes in ran.codes.items() for name in _names(code) for scope in scopes
        if ((value := scope.get(name)) is not but or but is None) and not (value is operator and _calls_methods(code))
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _formats(code: types.CodeType) -> bool:
    """Whether the code may make a text of a number by ``"%.2f" % x``, in which no method of the number is called."""
    if not any(type(one) is str and _CONVERSION.search(one) for one in code.co_consts):
        return False
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG", "NOP")]
    if not any(map(_takes_remainder, steps)):
        return False
    return any(
        type(one.argval) is str and _CONVERSION.search(one.argval) and _is_formatted(steps[at + 1 :])
        for at, one in enumerate(steps) if one.opname.startswith("LOAD_CONST")
    )  # fmt: skip


def _takes_remainder(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_OP" and step.argrepr in ("%", "%=")


def _is_formatted(steps: Sequence[dis.Instruction]) -> bool:
    """Whether what lies on top of the stack may be on the left of ``%`` in these steps. It is not where a call takes it
    before, as in ``log.info("%d", step)``, or an f-string that is no such operand itself."""
    above = 0
    for step in steps:
        if step.opname == "BUILD_STRING" and above < (step.arg or 0):
            above = 0
            continue
        if (step.opname == "BINARY_OP" and above < 2) or step.opcode in _MOVING:
            return above == 1 or not _takes_remainder(step)
        if above == 0 and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return False
        above += dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)
        if above < 0:
            return not step.opname.startswith(("CALL", "PRECALL", "POP_TOP", "RETURN", "RAISE"))
    return False


_MOVING = frozenset({*dis.hasjrel, *dis.hasjabs, *(dis.opmap.get(name, -1) for name in ("SWAP", "COPY", "FOR_ITER"))})
"""Operations after which not every path has as much on the stack."""


def _calls_methods(code: types.CodeType) -> bool:
    """Whether what it uses of ``operator`` calls methods of a number, as ``==`` does: torch compares shapes so."""
    return "index" not in code.co_names


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> Sequence[str]:
    """Names that the code uses, but for methods that it calls without arguments alone, as ``x.numpy()``."""
    called, others = set[str](), set[str](code.co_freevars)
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG")]
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.argval in code.co_names and step.opcode in _NAMING:
            is_called = step.opname in ("LOAD_METHOD", "LOAD_ATTR") and after is not None and after.opname == "CALL"
            (called if is_called and after is not None and after.arg == 0 else others).add(step.argval)
    return tuple(others | (set(code.co_names) - called))


def _reads(name: str, value: object) -> bool:
    package = package_behind(value)
    return name in _READ_IN_C or package in _READ_IN_C


def differ(then: Sequence[Number] | None, now: Sequence[Number] | None) -> bool:
    """Whether two recordings show where each of these numbers is: one that is equal in both looks like a constant."""
    pairs = list(zip(then or (), now or (), strict=True))
    return bool(pairs) and not any(same(other, value) for other, value in pairs)


def with_numbers(values: Values, positions: Sequence[int], numbers: Sequence[Number]) -> Values:
    """The values of a call with other numbers."""
    made = list(values)
    for at, number in zip(positions, numbers, strict=True):
        made[at] = number
    return tuple(made)


@frozen(eq=False)
class Watched:
    """What runs with noted numbers showed: the operators that ran, and the numbers that may have reached them."""

    sequence: tuple[str, ...]
    scalars: tuple[tuple[str, ...], ...]
    """What operators got besides tensors, as text (``Facts.scalars``)."""
    formulas: tuple[Formula, ...]
    amounts: Mapping[int, int]
    """What the body added to numbers in Python state, by position."""
    raising: tuple[Formula, ...] = ()
    """Formulas for which Python raises an error for some numbers: the body may catch it, and do something else."""
    computed: Computed | None = None
    """Formulas of what the body left in Python state, and of its result, where it has any."""
    unplaced: Sequence[Change] = ()
    """Changes of places that have to be arguments of the call for that."""
    asked: tuple[tuple[Question, Any], ...] = ()
    """What the body asks of the numbers, with the answers: for others it may do something else."""
    takes_index: bool = False
    """A number was taken for an index or a length."""
    is_rounded: bool = False
    """See ``Noting``."""

    def answers_alike(self, own: Sequence[Number]) -> bool:
        """Whether the body is answered for these numbers what it was. Raises what Python does."""
        return all(question.answer(own) == answer for question, answer in self.asked)

    def holds(self, own: Sequence[Number]) -> bool:
        """The same; not for numbers for which Python raises an error."""
        try:
            return self.answers_alike(own)
        except (ArithmeticError, ValueError, TypeError):
            return False

    def tells_apart(self, own: Sequence[Number], others: Sequence[Number]) -> bool:
        """Whether these questions alone have other answers for these numbers than for those."""
        try:
            return any(question.answer(own) != question.answer(others) for question, _ in self.asked)
        except (ArithmeticError, ValueError, TypeError):
            return True

    def values(self, own: Sequence[Number]) -> list[Number] | None:
        """All numbers that the body computes of its own; None where Python cannot."""
        try:
            known = dict[Formula, Any]()
            return [formula.value(own, known) for formula in self.formulas]
        except (ArithmeticError, ValueError, TypeError):
            return None

    def left(self) -> Any:
        """Equal where two runs left what follows from their numbers in the same way."""
        return None if self.computed is None else self.computed.text()

    def agrees(
        self, own: Sequence[Number], others: Sequence[Number], sequence: Sequence[str],
        scalars: Sequence[tuple[str, ...]],
    ) -> bool:  # fmt: skip
        """Whether a run with other numbers did the same, but for what follows from them. ``own``: the numbers of this
        run."""
        values, values_of_others = self.values(own), self.values(others)
        if values is None or values_of_others is None or tuple(sequence) != self.sequence:
            return False
        texts = {
            (repr(value), repr(value_of_other)) for value, value_of_other in zip(values, values_of_others, strict=True)
        }
        is_same = len(scalars) == len(self.scalars)
        return is_same and all(map(functools.partial(same_but, texts), self.scalars, scalars))


def noted_run(captured: Captured, call: Call, positions: Sequence[int]) -> Watched | None:
    """Watch the body with numbers that note who reads them, and undo it. None where Python code reads a number, or may
    do so unnoticed, or where there is nothing to record."""
    own: list[Number] = [call.values[at] for at in positions]
    has_int = any(type(one) is int for one in own)
    both = _with_wholes(captured, call, positions, own) if has_int else _noted(captured, call, positions, own)
    if both is None or both.takes_index:  # what follows from an index is not seen
        return None
    if both.asked or both.is_rounded:
        shows = not captured.lifted  # later the same numbers may count for the answers alone
        return both if _goes_on_alike(captured, call, positions, both, own, shows=shows) else None
    if not has_int:
        return both
    for far in (-_UNLIKELY, _UNLIKELY):  # of the one ``math`` has no root, of the other a float no power
        shifts = [far * (at + 1) for at in range(len(own))]
        others = [one + shift if type(one) is int else one for one, shift in zip(own, shifts, strict=True)]
        if _agrees(captured, call, positions, both, own, others):
            return both
    return None


def _goes_on_alike(
    captured: Captured, call: Call, positions: Sequence[int], watched: Watched, own: Sequence[Number], *, shows: bool
) -> bool:  # fmt: skip
    """Whether a run with other numbers, of which the body is answered the same, does the same. ``shows``: operators
    have to see that they are others, as numbers that count for nothing but the answers are left to ``decisions``."""
    values, kinds = watched.values(own), [type(one) for one in own]
    tried = itertools.islice(others_than(own, watched.formulas), _MOST_OTHERS)
    for others in tried:
        now = watched.values(others) if watched.holds(others) and [type(one) for one in others] == kinds else None
        if values is None or now is None or not differ(values, now):
            continue
        return _agrees(captured, call, positions, watched, own, others, shows=shows)
    return False


def _agrees(
    captured: Captured, call: Call, positions: Sequence[int], watched: Watched, own: Sequence[Number],
    others: Sequence[Number], *, shows: bool = False,
) -> bool:  # fmt: skip
    """A run with other numbers does the same, but for what follows from them. ``shows``: operators have to get that."""
    looks = watched.computed is None
    second = _tried(captured, call, positions, others, looks=looks)
    if second is None or (shows and second.scalars == watched.scalars):
        return False
    if not set(second.asked) <= set(watched.asked) or not watched.agrees(own, others, second.sequence, second.scalars):
        return False
    if not looks or watched.asked:
        second = _tried(captured, call, positions, others, has_wholes=True)
    if second is None or second.asked != watched.asked:
        return False
    return second.amounts == watched.amounts and second.left() == watched.left()


def _tried(
    captured: Captured, call: Call, positions: Sequence[int], own: Sequence[Number], *, has_wholes: bool = False,
    looks: bool = True,
) -> Watched | None:  # fmt: skip
    try:
        return _noted(captured, call, positions, own, has_wholes=has_wholes, looks=looks)
    except Exception as error:
        let_through(error)
        run = body_run.current()
        if run is None or run.error is not error:
            raise
        return None  # the body takes no such numbers


def _with_wholes(captured: Captured, call: Call, positions: Sequence[int], own: Sequence[Number]) -> Watched | None:
    """A float on its left does not ask a whole number (``0.9 ** step``, ``0.5 < step``). So the numbers are such as it
    asks in one run, which shows what is computed and left. Operators get other ones in it, and so there is one with
    ints, which has to do the same."""
    wholes = _tried(captured, call, positions, own, has_wholes=True)
    if wholes is None:
        return None
    ints = _noted(captured, call, positions, own, looks=wholes.computed is None)
    if ints is None or wholes.sequence != ints.sequence:
        return None
    if wholes.computed is None and (ints.amounts != wholes.amounts or ints.computed is not None):
        return None
    formulas = {formula.text(): formula for formula in (*ints.formulas, *wholes.formulas)}
    return evolve(wholes, scalars=ints.scalars, formulas=tuple(formulas.values()))


_MOST_OTHERS = 2048  # that are computed to find some with the same answers
_UNLIKELY = 1013
"""Indices, lengths and repetitions by its negative raise, or come to nothing."""


def same_but(texts: set[tuple[str, str]], values: tuple[str, ...], again: tuple[str, ...]) -> bool:
    """Whether an operator got equal arguments in two runs, ``values`` and ``again`` as text, but for numbers that the
    call gives. ``texts``: pairs of such numbers, of the first and of the second run."""

    def is_number(first: str, second: str) -> bool:
        (place, _, value), (place_of_other, _, value_of_other) = first.partition("="), second.partition("=")
        if place != place_of_other:
            return False
        parts = [[part.strip("[]() ") for part in text.split(",")] for text in (value, value_of_other)]
        return len(parts[0]) == len(parts[1]) and all(a == b or (a, b) in texts for a, b in zip(*parts, strict=True))

    return len(values) == len(again) and all(a == b or is_number(a, b) for a, b in zip(values, again, strict=True))


def differing_parts(
    scalars: Sequence[tuple[str, ...]], scalars_again: Sequence[tuple[str, ...]]
) -> set[tuple[str, str]]:  # fmt: skip
    """The numbers, as text, in which two runs differ that did the same else (``same_but``)."""
    pairs = (
        pair for values, again in zip(scalars, scalars_again, strict=True) for pair in zip(values, again, strict=True)
    )
    parts = [[[part.strip("[]() ") for part in text.partition("=")[2].split(",")] for text in pair] for pair in pairs]
    return {(a, b) for both in parts for a, b in zip(*both, strict=True) if a != b}


def _noted(
    captured: Captured, call: Call, positions: Sequence[int], own: Sequence[Number], *, has_wholes: bool = False,
    looks: bool = True,
) -> Watched | None:  # fmt: skip
    """``looks``: at what the run leaves; it is known else."""
    noting, amounts = Noting(asks=True, has_wholes=has_wholes), dict[int, int]()
    noted = evolve(call, values=with_numbers(call.values, positions, noting.begin(own)))
    noted.amounts = noted_amounts(noted, noting, own, positions, amounts)
    noted.formulas = reads = NotedReads(noting, frozenset(), tuple(positions))
    run = functools.partial(watched_with, captured, noted, dict(zip(positions, own, strict=True)))
    watched, described = run() if others_may_run() else noting_math(noting, run)
    facts = described.facts
    follows = not all(sync.is_compared for sync in facts.host_syncs) or not go_one_way(facts.reads)
    follows = follows or not all(island.is_undoable for island in facts.islands)
    if noting.is_read or facts.gradients or follows or asks_for_classes(watched.ran):
        return None
    if reads_in_c(watched.ran, but=None if others_may_run() else math):
        return None
    asked = tuple([one for one in noting.questions.items() if one[0].operation != "raises"])
    if noting.has_raised or any(answer and one.operation == "raises" for one, answer in noting.questions.items()):
        return None
    raising = tuple([formula for formula in noting.formulas.values() if formula.may_raise()])
    seen = Watched(
        facts.sequence, facts.scalars, tuple(noting.not_told().values()), amounts, raising, asked=asked,
        takes_index=bool(noting.indices), is_rounded=noting.is_rounded,
    )  # fmt: skip
    if not looks:
        return seen
    left = [leaf.value for several in described.effects for leaf in several.leaves]
    left += [leaf.value for leaf in described.outputs]
    if reads.is_lost or any(map(holds_noted, left)):
        return None  # a replay would give or leave the number that was recorded
    computed = reads.computed if reads.computed is not None and reads.computed.is_any() else None
    if computed is not None and not _only_computes(facts):
        return None
    changed = [one for one in watched.changed if one.amount is None and not one.is_read_anew]
    if any(number_of_place(call.binder.places, one.source) is not None for one in changed):
        return None  # the body itself puts another number there
    unplaced = () if computed is None else reads.unplaced
    return evolve(seen, computed=computed, unplaced=unplaced)


def _only_computes(facts: Facts) -> bool:
    """Whether a run that leaves what formulas give does nothing else that a number may have a part in."""
    kinds = {effect.kind for effect in facts.effects}
    return not facts.calls_foreign and kinds.isdisjoint(("python", "container", "call"))


def may_lift(entry: Entry) -> bool:
    """Whether its recordings go one way: nothing follows from what the host reads; and all that islands do can be
    undone, as further runs do it again. Segments that are captured are not compared with others."""
    executes = entry.backend is not None and entry.backend.executes_recording_runs
    undoable = all(island.is_undoable for facts in entry.known_facts() for island in facts.islands)
    return not entry.has_reads or (executes and undoable and entry.goes_one_way)


def twins_of(
    entry: Entry, entries: Sequence[Entry], lifted: Sequence[Lifted], values: Values
) -> Iterator[tuple[Entry, tuple[int, ...]]]:
    """Entries that are, or can be, recorded, whose keys have other numbers than this one's, and the positions of their
    parameters. Where that is one of ``lifted`` numbers, those are to be others, too."""
    if len(entries) > _MOST_FAMILIES:
        return
    lifted_of = {id(lifted_call.entry): lifted_call for lifted_call in lifted}
    for candidate in entries:
        if (
            candidate is entry
            or candidate.phase not in ("warm", "ready")
            or candidate.region is not None
            or not may_lift(candidate)
        ):
            continue
        at, less = _differing(entry.key, candidate.key), lifted_of.get(id(candidate))
        if not at or (less is not None and (not less.is_there() or not set(less.positions) <= set(at))):
            continue
        if all(type(values[position]) in (float, int) for position in at):
            yield candidate, at


def _differing(key: Any, other: Any) -> tuple[int, ...]:
    """Positions at which arguments are other numbers, where nothing else differs; else none."""
    if len(key) != len(other) or key[0] != other[0] or key[2:] != other[2:]:
        return ()
    return tuple(_numbers_in(key[1], other[1]))


@frozen(eq=False)
class Changing:
    """Numbers in Python state, by their places, and what a watched run did with others there."""

    places: tuple[InputPlace, ...]
    then: tuple[Number, ...]
    facts: Facts

    def follow(self, watched: Watched, own: Sequence[Number]) -> bool:
        """Whether what differed between that run and this one follows from the numbers: nothing counts in Python,
        too."""
        return watched.agrees(own, self.then, self.facts.sequence, self.facts.scalars)


def changing_places(captured: Captured, entry: Entry, values: Values) -> Iterator[Changing]:
    """Numbers in which alone the key of an entry differs from those of others that are, or can be, recorded.
    ``values``: those of its call."""
    entries = captured.entries()
    for candidate in entries if len(entries) <= _MOST_FAMILIES else ():
        is_recorded = candidate.phase in ("warm", "ready") and candidate.region is None and may_lift(candidate)
        if candidate.plan is None or candidate.plan.collectives:  # it takes runs that other ranks do not make
            continue
        with_state = len(candidate.key) == len(entry.key) == _WITH_STATE
        if candidate is not entry and candidate.facts is not None and is_recorded and with_state:
            found = _differing_places(captured, values, entry.key, candidate.key)
            if found:
                places, then = zip(*found, strict=True)
                if candidate.facts.calls_foreign and sets_anew(candidate, places):
                    return
                yield Changing(places, then, candidate.facts)


def sets_anew(entry: Entry, places: Sequence[InputPlace]) -> bool:
    """Whether the body of an entry sets one of these numbers in another way than by adding to it. It may come from a
    clock or a counter in C then, which an undone run would advance."""
    names = {name[1] if type(name) is tuple else name for name in uses_of_names(entry.ran).counted}
    names.update(*map(updated_names, entry.ran.codes))
    effects = entry.facts.effects if entry.facts is not None else ()
    written = {tail_of(effect.path) for effect in effects}
    return any(tail_of(place.path) in written and tail_of(place.path)[-1] not in names for place in places)


def tail_of(path: str) -> tuple[str, ...]:
    """The names of a container and of its member, whatever leads to it: guards check what was left out wrongly."""
    return tuple(path.split(".")[-2:])


NAMED, SETTINGS, _WITH_STATE = 2, 5, 7
"""What a key that has state consists of: modes, arguments, what is named, modules, guards, settings, aliases."""


def _differing_places(
    captured: Captured, values: Values, key: Any, key_before: Any
) -> list[tuple[InputPlace, Number]]:  # fmt: skip
    if any(key[at] != key_before[at] for at in range(_WITH_STATE) if at not in (NAMED, SETTINGS)):
        return []
    places: dict[Any, tuple[InputPlace, Number]] = {}
    for at in (NAMED, SETTINGS):
        if len(key[at]) != len(key_before[at]):
            return []
        for number, (part, then) in enumerate(zip(key[at], key_before[at], strict=True)):
            found = places_of_part(captured, values, at, number, (part, then), _vary_in_state) if part != then else []
            if found is None:
                return []
            places |= {place.key(): (place, value) for place, value in found}
    return [*places.values()]


def place_of_part(captured: Captured, values: Values, at: int, part: int) -> InputPlace | None:
    """The place of one number among those that are named, or among settings of optimizers (``at``)."""
    named, optimizers = captured.named, captured.optimizers
    kept = named.keeper_of(part, captured.receiver_of, values) if at == NAMED else optimizers.keeper_of(part)
    return None if kept is None else number_place(kept[2], kept[0], kept[1])


def places_of_part(
    captured: Captured, call_values: Values, at: int, part: int, values: tuple[Any, Any],
    vary: Callable[[Any, Any], bool],
) -> list[tuple[InputPlace, Number]] | None:  # fmt: skip
    """The places, with the numbers of the other key, of one part of two keys: one number, or some in a dict. None where
    it differs in something else, or in numbers that do not ``vary``."""
    if vary(*values):
        place = place_of_part(captured, call_values, at, part)
        return None if place is None else [(place, number_of(values[1]))]
    reader = captured.named.reader_of(part, captured.receiver_of) if at == NAMED else None
    if reader is None or any(type(value) is not tuple or not value or value[0] is not dict for value in values):
        return None
    ours, theirs = ([(member[1], member[2]) for member in value[1:]] for value in values)
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return None
    places = []
    for (name, now), (_, then) in zip(ours, theirs, strict=True):
        if now != then:
            read, path = reader
            place = number_place(f"{path}.{name}", read, name) if type(name) is str and vary(now, then) else None
            if place is None:
                return None
            places.append((place, number_of(then)))
    return places


def _vary_in_state(one: Any, other: Any) -> bool:
    return are_numbers(one, other) and is_number_in_state(one) and is_number_in_state(other)


def _numbers_in(parts: Sequence[Any], others: Sequence[Any]) -> list[int]:
    """The positions at which two keys have other numbers of the same type; empty where they differ in more."""
    if len(parts) != len(others):
        return []
    places = [at for at, (part, other) in enumerate(zip(parts, others, strict=True)) if part != other]
    pairs = [(parts[at], others[at]) for at in places]
    both = all(is_number(part) and is_number(other) and part[0] is other[0] for part, other in pairs)
    return places if both else []


def is_number(part: Any) -> bool:
    """Whether this part of a key is that of a plain number which may vary."""
    is_one = type(part) is tuple and len(part) == 2 and part[0] in (float, int)
    return is_one and may_vary(number_of(part))


def is_number_in_state(part: Any) -> bool:
    """The same for one in Python state. A whole number may be any there: it is most often a count, and what operators
    get is made of it."""
    return is_number(part) or (type(part) is tuple and len(part) == 2 and part[0] is int)


def number_of(part: Any) -> Number:
    """The number that this part of a key stands for."""
    kind, value = part
    number: Number = float_of(value) if kind is float else value
    return number


@define(eq=False)
class Lifted:
    """One recording for all values of some numbers."""

    entry: Entry
    """Only this object leads calls to it."""
    family: Family
    """Its family, which is not among those of the function any more."""
    key: Any
    node: Node
    tree: Tree
    numbers: LiftedNumbers
    watched: Watched
    positions: tuple[int, ...]
    values: Values
    """The values of the call that was recorded, from which the recording's key is made."""
    paths: Shortcuts
    count: Count = field(factory=Count)
    is_busy: bool = False
    is_broken: bool = False
    """Numbers were to be set, and it may have any of them since."""
    under_way: Values | None = None
    """The caller's values in the call by a fast path."""
    _is_plain: bool = field(init=False)
    """Operators get the numbers of the call as they are."""

    def __attrs_post_init__(self) -> None:
        self._is_plain = tuple(self.numbers.used) == tuple(range(len(self.positions)))

    def is_there(self) -> bool:
        """Whether its recording begins a step of this thread."""
        here = self.tree.thread == threading.get_ident() and self.node.parent is self.tree.root
        return here and self.node in self.entry.nodes

    def taken(self, values: Values) -> list[Number] | None:
        """What operators get of the numbers of a call; None if those are not to be lifted, or not here."""
        if self.is_busy or self.is_broken or self.tree.thread != threading.get_ident():
            return None
        if len(values) != len(self.values):
            return None
        own = []
        for at in self.positions:
            value = values[at]
            if type(value) is not type(self.values[at]):
                return None
            own.append(value)
        return self.numbers_of(own)

    def numbers_of(self, own: Sequence[Number]) -> list[Number] | None:
        """What operators get for these numbers of a call; None where Python cannot compute it."""
        used, known = self.numbers.used, dict[Formula, Any]()
        try:
            call_numbers = own if self._is_plain else [self.watched.formulas[at].value(own, known) for at in used]
            for formula in self.watched.raising:
                formula.value(own, known)
            if not self.watched.answers_alike(own):
                return None
        except (ArithmeticError, ValueError, TypeError):  # Python raises that again, in the body
            return None
        for number, value in enumerate(call_numbers):
            if type(value) not in (float, int) or not may_vary(value):
                return None
            if number in self.numbers.powers and (type(value) is int or float(value).is_integer()):
                return None
        return list(call_numbers) if self.numbers.takes(call_numbers) else None

    def standing(self, values: Values) -> Values:
        """The call that was recorded, with these values but for the numbers."""
        made = list(values)
        for at in self.positions:
            made[at] = self.values[at]
        return tuple(made)

    def add_path(self, captured: Captured, values: Values, leaves: list[Any], now: Here, goes_on: GoesOn) -> None:
        """The next call like this one may take a fast path."""
        self.paths.add(captured, values, leaves, self.entry, now, goes_on)

    def run(self, given: Sequence[Number], function: Callable[[], Any]) -> Any:
        """With these numbers in the recording; ``MISS`` if they cannot be set. Nobody else runs it meanwhile: a call in
        a signal's handler does not."""
        self.is_busy = True
        try:
            self.is_broken = True
            self.is_broken = not self.numbers.put(given)
            return MISS if self.is_broken else function()
        finally:
            self.is_busy, self.under_way = False, None

    def replayed(self, values: Values) -> Any:
        """The result of a call by a fast path; ``MISS`` if there is none."""
        payoff = self.entry.payoff
        given = None if self.count.is_due or payoff.wants_body else self.taken(values)
        if given is None:
            return MISS
        clock = clock_of(self.entry) if payoff.is_open else None
        begin = 0.0 if clock is None else clock()
        standing, self.under_way = self.standing(values), values
        result = self.run(given, lambda: self.paths.call(standing))
        if result is not MISS:
            self.count.calls += 1
            payoff.note_replay(0.0 if clock is None else clock() - begin)
        return result

    def values_now(self) -> Values | None:
        """The caller's values in the call by a fast path that is under way; None outside of one."""
        return self.under_way


@define(eq=False)
class NumberComparison(Comparison):
    """Compares a replay with other numbers with the body."""

    lifted: Lifted = field(kw_only=True)
    numbers: Sequence[Number] = field(kw_only=True)
    leaves: list[Any] = field(kw_only=True)

    @override
    def _leaves(self) -> list[Any]:
        return self.leaves

    @override
    def _replayed(self, before: State) -> Any:
        result = self.lifted.run(self.numbers, functools.partial(super()._replayed, before))
        if result is MISS:
            raise NoMemoryError("the numbers of a recording cannot be set")
        return result


def compared(captured: Captured, lifted: Lifted, call: Call, numbers: Sequence[Number], leaves: list[Any]) -> Verified:
    """Compare a replay with the body. ``leaves``: of the call that was recorded."""
    captured.log.counters.verifications += 1
    comparison = NumberComparison(
        captured, lifted.entry, lifted.node, lifted.tree, call, lifted=lifted, numbers=numbers, leaves=leaves
    )
    try:
        return comparison.run()
    except NoMemoryError:
        captured.log.add("verify", NO_MEMORY)
        return Verified(comparison.eager, has_result=comparison.has_run, undecided=NO_MEMORY)
