"""Lifted calls: one recording serves all values of numbers that are others in each call.

`numbers` holds what is known of such a recording; here one is made of two entries, found for a call, and compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from capture.core import forks
from capture.core.config import current as current_config
from capture.core.interrupts import let_through
from capture.engines.base import LiftedNumbers, Move, Number, NumbersToLift, Recording
from capture.guards.guard import OVERLAPS
from capture.key.argument_numbers import ArgumentNumber, differing
from capture.key.input_places import InputPlace, with_places
from capture.key.modes import Here
from capture.key.signature import Leaf, Leaves
from capture.native import MISS, native
from capture.observe import islands
from capture.observe.capture_lock import locked
from capture.observe.returned_value import go_one_way
from capture.runtime import inputs, numbers, payoff, rebind, verify
from capture.runtime.buckets import Count, Values
from capture.runtime.captured import Captured
from capture.runtime.checked_replay import verifies
from capture.runtime.eager_call import is_measured, measure_body
from capture.runtime.entry import Entry
from capture.runtime.fast_path import Shortcuts
from capture.runtime.formulas import place_of
from capture.runtime.inputs import generators_of
from capture.runtime.matching import fitting
from capture.runtime.noted_runs import holding
from capture.runtime.phases import forget
from capture.runtime.replay_apart import GoesOnApart
from capture.runtime.undone_runs import bring_to_replay
from capture.runtime.verdict import Verdict
from capture.runtime.whole_replay import replay_whole
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.torch_private.threads import others_may_run
from capture.tree.node import Node
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree

_lifting = forks.lock()
_MOST_PLACES = 16  # that are read in each call
_MOST_ENTRIES = 64  # that are searched for one that has other numbers
_MOST_ROUNDS = 4  # in which further places become arguments
_MOST_LIFTED = 15  # recordings of one function: for its shapes, modes and threads


def lift(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """A new key that differs from a known one in numbers alone: have one recording serve both. The call's result, or
    ``MISS`` where that is not so."""
    plain = captured.sizes is None and not captured.is_backward and entry.region is None
    begins = tree.backend.lifts_numbers and not (tree.path or tree.warm)
    if not plain or not begins or not any(type(value) in (float, int) for value in bound.values):
        return MISS
    found = [
        (twin, positions)
        for twin, positions in numbers.twins_of(entry, captured.entries(), captured.lifted, bound.values)
        if not _is_known_apart(captured, twin, positions, bound.values)
    ]
    twins = [twin for twin, positions in found if positions == found[0][1]]
    if not twins or any(twin.plan is None or twin.plan.collectives for twin in twins):  # of runs that other ranks make
        return MISS
    positions, first_place = found[0][1], len(captured.binder.names) - len(captured.binder.places)
    if max(positions) >= first_place and others_may_run():  # who would see the numbers put there
        return MISS
    run = BodyRun()
    lifting = body_run.during, (run, _lifted, (captured, entry, bound, twins, positions, tree))
    try:
        lifted = NotImplemented if _lifting._is_owned() else native.locked(_lifting, *lifting, None)
    except Exception as error:
        let_through(error)
        if run.error is not error:
            raise
        lifted = None  # those of the body itself, to which the call comes now
    if lifted is NotImplemented:  # somebody compares entries, and takes some away
        return MISS
    if lifted is None:
        captured.lifts_left = max(captured.lifts_left - 1, 0)
        if not captured.lifts_left:
            captured.optimizers.numbers_of_call.clear()
        return MISS
    for lifted_before in tuple(captured.lifted):
        if any(lifted_before.entry is twin for twin in twins):  # it serves the values of fewer numbers
            _lift_no_more(captured, lifted_before)
    alive = [lifted_before for lifted_before in captured.lifted if lifted_before.node.recording is not None]
    captured.lifted[:] = [*alive[-_MOST_LIFTED:], lifted]
    captured.log.add("plan", "one recording serves all values of its numbers")
    result = _compare_numbers(captured, lifted, bound, bound.leaves)
    lifted.count = Count()  # it was the number that was recorded: the next one shows more
    return result


def _is_known_apart(captured: Captured, twin: Entry, positions: tuple[int, ...], values: Values) -> bool:
    """Whether the body is known to ask something of the numbers that has another answer for those of another entry."""
    now, then = [values[at] for at in positions], [numbers.number_of(twin.key[1][at]) for at in positions]
    return any(one.positions == positions and one.watched.tells_apart(now, then) for one in captured.lifted)


def finds_numbers(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> bool:
    """A new key that differs from a known one in numbers in Python state, such as a learning rate that a schedule sets:
    if only operators get them, they are arguments from now on, in effect, and all that was recorded is dropped."""
    plain = captured.sizes is None and not captured.is_backward and entry.region is None
    if not plain or not tree.backend.lifts_numbers or tree.path or tree.warm:
        return False
    if len(captured.binder.places) >= _MOST_PLACES or others_may_run():  # who would see the numbers put there
        return False
    found = [*numbers.changing_places(captured, entry, bound.values)]
    changing = [one for one in found if [at.key() for at in one.places] == [at.key() for at in found[0].places]]
    if not changing or not captured.read_numbers.isdisjoint(place.path for place in changing[0].places):
        return False
    run = BodyRun()
    try:
        lifted = body_run.during(run, _are_lifted, (captured, bound, changing))
    except Exception as error:
        let_through(error)
        if run.error is not error:
            raise
        lifted = None
    if lifted is None:
        captured.read_numbers.update(one.path for one in changing[0].places)
        return False
    places, watched = lifted
    if not places:
        captured.lifts_left = max(captured.lifts_left - 1, 0)
        return False
    captured.take_inputs(places)
    captured.note_computed(watched.computed)
    captured.optimizers.follow(place.read for place in places)
    captured.note_added((places[at - len(bound.values)], amount) for at, amount in watched.amounts.items())
    paths = ", ".join([one.path for one in places])
    captured.log.add("drop", f"{paths}: another number in each call, an input from now on")
    forget(captured, entry, tree)
    captured.retire()
    captured.budget.start_anew()  # what was tried had keys that no call has any more
    return True


def opens_numbers(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> bool:
    """A new key that differs from known ones in numbers in containers among the arguments, as in ``batch["step"]``:
    they are inputs of their own from now on, and all that was recorded is dropped. Two values are most often a choice
    of two ways, and each keeps its recording."""
    plain = captured.sizes is None and not captured.is_backward and entry.region is None
    if not plain or not 3 <= len(captured.families) <= _MOST_ENTRIES or others_may_run():  # who would see the numbers
        return False
    without = lambda number: captured.arguments(bound.values, Leaves(), (number,))  # noqa: E731
    found = list[ArgumentNumber]()
    for other in captured.entries():
        is_like = other is not entry and other.region is None and len(other.key) == len(entry.key)
        if not is_like or other.key[0] != entry.key[0] or other.key[2:] != entry.key[2:]:
            continue
        places = differing(captured.binder, bound.values, entry.key[1], other.key[1], without)
        known = {one.key() for one in found}
        again = [one for one in places if one.key() in known]
        found += [one for one in places if one.key() not in known]
        if again and len(captured.binder.places) + len(again) <= _MOST_PLACES:
            captured.take_numbers(again)
            paths = ", ".join([one.path for one in again])
            captured.log.add("drop", f"{paths}: another number in call after call, an input of its own from now on")
            forget(captured, entry, tree)
            captured.retire()
            return True
    return False


def _are_lifted(
    captured: Captured, bound: Call, changing: Sequence[numbers.Changing]
) -> tuple[list[InputPlace], numbers.Watched] | None:  # fmt: skip
    """What a run with them as arguments showed, if only operators get them, and the body leaves what follows from them.
    Where that is the number in a further place, this becomes an argument, too. No places where the body was answered
    something else in all runs before: the next one may show more."""
    places = [*changing[0].places]
    own = [one.read() for one in places]
    for _ in range(_MOST_ROUNDS):
        call = captured.call((*bound.values, *[one.read() for one in places]), bound.leaves)
        call.binder = with_places(call.binder, places)
        watched = numbers.noted_run(captured, call, range(len(bound.values), len(call.values)))
        if watched is None or not watched.unplaced:
            break
        more = [place_of(change) for change in watched.unplaced]
        places += [place for place in more if place is not None]
        if None in more or len(captured.binder.places) + len(places) > _MOST_PLACES:
            return None
    if watched is None or watched.unplaced:
        return None
    if len(places) > len(own) or any(one.follow(watched, own) for one in changing):
        return places, watched
    return None if any(watched.holds(one.then) for one in changing) else ([], watched)


def _lifted(
    captured: Captured, entry: Entry, bound: Call, twins: Sequence[Entry], positions: tuple[int, ...], tree: Tree
) -> numbers.Lifted | None:  # fmt: skip
    """Record both calls, without a trace, and compare what was recorded."""
    watched = numbers.noted_run(captured, bound, positions)
    if watched is None:
        captured.lifts_left = 0  # the code is the same with other numbers
        return None
    now = [bound.values[at] for at in positions]
    others = ((one, [numbers.number_of(one.key[1][at]) for at in positions]) for one in twins)
    alike = next(((one, own) for one, own in others if watched.holds(own)), None)
    if alike is None:  # of another one the body was told something else
        return None
    twin, then = alike
    captured.decisions_left = 0  # the answers are not all that comes of them
    captured.note_computed(watched.computed)
    first, places = len(bound.values) - len(bound.binder.places), bound.binder.places
    captured.note_added((places[at - first], amount) for at, amount in watched.amounts.items())
    node, twin_node = (
        _node_at_root(captured, each, numbers.with_numbers(bound.values, positions, own), bound.leaves, tree)
        for each, own in ((entry, now), (twin, then))
    )
    if node is None or twin_node is None or entry.facts is None or entry.facts.sequence != watched.sequence:
        return None
    if any(_left(one) != watched.left() for one in (node, twin_node)):
        return None
    assert twin_node.recording is not None
    assert node.recording is not None
    numbers_or_reason = _found(
        captured, entry, bound, positions, tree, twin_node.recording, node.recording, watched, then
    )
    if isinstance(numbers_or_reason, str):
        captured.log.add("plan", f"numbers stay in the key: {numbers_or_reason}")
        return None
    if node.tree is None:  # the pool was given up
        return None
    family_of_lifted = entry.family
    if family_of_lifted is None:  # another thread dropped it
        return None
    lifted = numbers.Lifted(
        entry, family_of_lifted, entry.key, node, tree, numbers_or_reason, watched, positions, bound.values, Shortcuts()
    )
    if lifted.taken(bound.values) is None:
        return None
    for each in (twin, entry):  # calls come to the recording by ``Lifted`` alone, which sets their numbers
        family = captured.families.pop(each.key[:-1], None)
        for below in list(family.entries.values()) if family is not None else ():
            if below is not entry:
                below.retire()
    captured.clear_fast_paths()
    return lifted


def _found(
    captured: Captured, entry: Entry, bound: Call, positions: tuple[int, ...], tree: Tree, first: Recording,
    second: Recording, watched: numbers.Watched, then: Sequence[Number],
) -> LiftedNumbers | str:  # fmt: skip
    """Where the recording has its numbers. An engine may run the body's Python again, as for a recording."""

    def again(own: Sequence[Number]) -> tuple[Call, Sequence[torch.Generator]]:
        tree.recording, tree.pool_is_at = True, None
        tree.before_recording(captured.log)
        call = captured.call(numbers.with_numbers(bound.values, positions, own), bound.leaves, entry)
        return call, generators_of(call, entry)

    now = tuple(bound.values[at] for at in positions)
    if not numbers.differ(watched.values(then), watched.values(now)):
        return "what Python computes of them is equal for both values"
    given = NumbersToLift(tuple(then), now, watched.values, again, watched.holds)
    if not tree.may_record(captured.log):
        return "its pool was given up"
    try:
        numbers_or_reason: LiftedNumbers | str = locked(tree.backend.lift, first, second, given)
    finally:
        captures = tree.recording
        if captures:
            tree.recording, tree.pool_is_at = False, None
    if captures:
        tree.put_away(captured.log, "a further capture")
    if isinstance(numbers_or_reason, str):
        return numbers_or_reason
    reached = frozenset[int]().union(*(watched.formulas[at].origins() for at in numbers_or_reason.used))
    counted = {  # what it is for may be later
        number for number, at in enumerate(positions)
        if at in watched.amounts
        or (watched.computed is not None and watched.computed.has(at, captured.binder.names[at].strip("<>")))
    }  # fmt: skip
    asked = frozenset[int]().union(*(question.origins() for question, _ in watched.asked))
    return numbers_or_reason if len(reached | counted | asked) == len(now) else "a number reaches no operator"


def _left(node: Node) -> Any:
    """As ``Watched.left``, of a recording."""
    return None if node.computed is None or not node.computed.is_any() else node.computed.text()


def _node_at_root(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf], tree: Tree) -> Node | None:
    """A recording that begins a step, made without a trace where there is none."""

    def found() -> Node | None:
        return next((node for node in entry.nodes if node.parent is tree.root and go_one_way(node.reads)), None)

    if found() is None:
        call = captured.call(values, leaves)
        recorded = functools.partial(
            bring_to_replay, captured, entry, call, tree, lambda: found() is not None, with_gradients=False
        )
        holding(call, {}, recorded)
        tree.end_path("numbers")
    return found()


ByNumber = tuple[numbers.Lifted, Sequence[Number], list[Leaf]]
"""A recording that serves all values of its numbers, and those and the leaves of a call."""


def find_lifted(captured: Captured, values: Values, now: Here) -> ByNumber | None:
    """A recording that may serve this call, if there is one. Raises as ``find_entry``; nothing has run then."""
    for lifted in tuple(captured.lifted):
        if lifted.is_broken and not lifted.is_busy:
            _lift_no_more(captured, lifted)
        call_numbers = lifted.taken(values)
        if call_numbers is None:
            continue
        standing, leaves = lifted.standing(values), Leaves()
        key = (
            now.ambient,
            captured.arguments(standing, leaves),
            *(captured.rest(standing) if lifted.key[2:-1] else ()),
        )
        family = lifted.family
        if key != lifted.key[:-1] or inputs.alias_pattern(leaves, family.spans) != lifted.key[-1]:
            continue
        if family.counted(family.form(leaves)) == family.counted(lifted.entry.form):
            return lifted, call_numbers, leaves
    return None


def call_lifted(captured: Captured, by_number: ByNumber, values: Values, now: Here) -> Any:
    """The result of a call by that recording; ``MISS`` where it does not fit."""
    lifted, taken, leaves = by_number
    entry, tree, standing = lifted.entry, lifted.tree, lifted.standing(values)
    if tree_for(tree.backend, tree.number) is not tree:  # that of a thread which is gone, whose number this one has
        _lift_no_more(captured, lifted)
        return MISS
    tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    if tree.lingering:
        tree.let_go()
    if tree.warm or tree.backend.in_capture():
        return MISS
    if entry.payoff.wants_body:
        if is_measured(captured, entry):
            return measure_body(captured, entry, captured.call(values, leaves), tree)
        entry.payoff.give_up()
    clock = payoff.clock_of(entry) if is_measured(captured, entry) else None
    begun = 0.0 if clock is None else clock()
    node = fitting(captured, entry, tree, tree.pattern(leaves)) if lifted.node in entry.nodes else None
    if node is None or (state := node.check(leaves)) == OVERLAPS:
        if lifted.node not in entry.nodes:
            _lift_no_more(captured, lifted)
        return MISS
    learned: Sequence[Move] = ()
    if state:
        reply = rebind.state_moved(captured, entry, node, standing, leaves, tree)
        if reply.verdict is not Verdict.REPLAY:
            _lift_no_more(captured, lifted)
            return MISS
        learned = reply.learned
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    bound = captured.call(values, leaves)
    if lifted.count.is_due or learned or verifies(captured):
        return _compare_numbers(captured, lifted, bound, leaves)
    run = body_run.current()
    result = lifted.run(taken, lambda: replay_whole(captured, node, tree, values, leaves, run))
    if lifted.is_broken:
        _lift_no_more(captured, lifted)
        return result
    lifted.count.calls += 1
    lifted.add_path(captured, standing, leaves, now, GoesOnApart(captured, own_values=lifted.values_now))
    if clock is not None:  # where state moves in each call, no fast path ever takes one
        entry.payoff.note_replay(clock() - begun)
    return result


def _compare_numbers(captured: Captured, lifted: numbers.Lifted, bound: Call, leaves: list[Leaf]) -> Any:
    """The result of a call whose replay is compared with its body."""
    call_numbers = lifted.taken(bound.values)
    if call_numbers is None:  # of the call that was recorded: it is right for others
        return MISS
    verified = numbers.compared(captured, lifted, bound, call_numbers, leaves)
    if verified.stopped is not None:
        islands.answer(body_run.current(), verified.stopped.ran)
    elif verified.is_wrong or lifted.is_broken:
        captured.lifts_left = 0
        _lift_no_more(captured, lifted)
    elif verified.undecided is None:
        lifted.count.compared()
    return verified.result if verified.has_result else verify.run_body(captured, bound)


def _lift_no_more(captured: Captured, lifted: numbers.Lifted) -> None:
    """Its numbers are part of the key again."""
    captured.log.add("drop", "numbers are part of the key again")
    if lifted in captured.lifted:
        captured.lifted.remove(lifted)
    for node in list(lifted.entry.nodes):
        tree_for(lifted.tree.backend, lifted.tree.number).forget(node)
    lifted.entry.retire()
