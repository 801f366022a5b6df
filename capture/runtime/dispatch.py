"""Dispatch: what a captured function does when it is called. Only here is decided.

A call comes in by ``call``. Inside another captured function, or switched off, its body runs as it is. A call that
repeats an earlier one is taken by ``fast_path``, and nothing below happens. Else its key tells the ``Entry``, and the
entry's phase tells the stage that is asked:

    cold    nothing is known   planning.load     another process left a plan, or not
                               planning.observe  one eager run, watched; its facts make the plan
    warm    a plan             eager runs that have to come before a recording
    ready   recordings         tree              which recording follows on those of this step, and does its state hold?
                               record            none fits: run the call and record it
                               rebind            its state lies elsewhere: point it there
                               verify            run it and the body, and compare
                               replay            run it
    eager   a plan that says   the body runs, once the reason was told
            why not

Stages give back a ``Reply``, a ``Phase`` or facts. They do not know this module, and none of them runs a body eagerly,
starts a call over or writes a phase: ``enter`` does, ``run_eagerly`` and ``_go_on``. An entry moves

    cold -> warm -> ready      as planned
    cold -> ready              by a plan from the store, which the recording checks
    any  -> cold               what was known does not hold: ``forget``, ``planning.replace``
    any  -> warm               a recording run was none, or another than planned, and may come out the next time
    any  -> eager              the plan says so, the runs never settle, or a replay was found to be wrong

``Verdict`` says how a call goes on after a stage: ``DONE`` with its result; ``REPLAY`` what was found; ``OBSERVE`` or
``EAGER`` instead; ``GO_ON``: as the entry has another phase or other recordings now, ask by those; ``START_OVER``: the
key has other parts now, which only a new look at the call tells.

What stands around the stages has files of its own: ``matching`` finds the entry and the recording that fits,
``eager_call`` runs the body, ``watched_call`` has it watched or recorded, ``checked_replay`` compares where that is
due, ``limits`` tells why there is no recording, ``state_changes`` makes names and objects parts of the key, ``phases``
moves entries, and ``fault_boundary`` ends a call in which something of this library goes wrong. ``padded_call`` and
``lifted_call`` replay a call as one of another size, or with other numbers; ``undone_runs`` takes the same steps for a
warm-up.

Where results need gradients, what is watched and recorded is the forward pass (``training_region``): this module has
its results made part of the caller's graph, and autograd calls the backward pass, a captured function of its own.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from capture.core.config import current as current_config
from capture.core.data import frozen
from capture.core.errors import CaptureBug
from capture.core.facts import Inlined, Island
from capture.core.interrupts import is_interrupt
from capture.guards.guard import OVERLAPS
from capture.key.modes import Here, foreign, here
from capture.key.signature import Leaf, Unkeyable
from capture.native import MISS, native
from capture.observe import islands, run, source_location
from capture.observe.returned_value import ASKED
from capture.rules.compile_plan import compile_plan
from capture.runtime import (
    arrays,
    branches,
    decisions,
    eviction,
    given_numbers,
    inputs,
    miss_reason,
    payoff,
    rebind,
    verify,
)  # fmt: skip
from capture.runtime.buckets import Size, Values
from capture.runtime.captured import Captured
from capture.runtime.checked_replay import replay_checked, verifies
from capture.runtime.eager_call import body_in_place, is_measured, measure_body, run_eagerly, run_on_trial, warm_up
from capture.runtime.entry import MOST_BRANCHES, Entry
from capture.runtime.fault_boundary import MOST_FAULTS, guarded
from capture.runtime.lifted_call import call_lifted, find_lifted, finds_numbers, lift, opens_numbers
from capture.runtime.limits import run_at_limit, run_beside_threads, run_given_up, run_too_large, run_without_key
from capture.runtime.matching import engine_of, find_entry, fitting, siblings_after, starts_over
from capture.runtime.padded_call import replay_padded
from capture.runtime.phases import enter, give_up_gradients, give_up_reads, load, note_difference
from capture.runtime.replay import Commit, replay, tell
from capture.runtime.state_changes import after_move, finds_inputs, finds_moving, tells_apart
from capture.runtime.training_region import finish
from capture.runtime.verdict import GO_ON, START_OVER, Reply, Verdict, done
from capture.runtime.watched_call import is_read_once_more, observe_call, read_once_more, record_call
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.tree.node import Node, Pattern
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree

MOST_STARTS = 16  # of one call: a stage that finds the key to be another one each time is at fault

# -------------------------------------------------------------------------------------------------- from call to entry


def call(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, in the caller's own form. The steps are in the order of their cost."""
    resting = captured.budget.resting
    if kwargs and captured.fast_paths.are_there and (resting or captured.sizes is None):
        # they compare all that is looked at below, as where nothing is named
        result = _named(captured, args, kwargs)
        if result is not MISS:
            return result
    if resting and run.active_watch() is None:
        return _straight(captured, args, kwargs)
    if (trial := captured.trial) is not None and run.active_watch() is None:
        return run_on_trial(captured, trial, args, kwargs)
    now, config = here(), current_config()
    if now is None or not config.enabled:
        return _inline(captured, args, kwargs)
    try:
        values = captured.bind(args, kwargs)
    except TypeError:
        captured.log.counters.inline_calls += 1
        return captured.body()(*args, **kwargs)  # raises its own, better worded error
    is_plain = not config.poison and config.verify == "off"
    if captured.sizes is not None:
        size = captured.sizes.size_of(values)
        size.calls += 1
        if size.pads:
            return _call_of_size(captured, values, size, now, is_plain=is_plain)
    if captured.lifted and is_plain:
        for lifted in tuple(captured.lifted):
            result = lifted.replayed(values)
            if result is not MISS:
                return result
    if captured.decisions is not None and is_plain:
        result = _by_answers(captured, values)
    else:
        result = captured.fast_paths.call(values) if is_plain else MISS
    return result if result is not MISS else dispatch(captured, values, now)


def _by_answers(captured: Captured, values: Values) -> Any:
    """The result of a call by a fast path for all numbers of which the body's questions have the same answers."""
    standing, thread = captured.decisions.standing(values), threading.get_ident()
    before = captured.under_way.get(thread)
    captured.under_way[thread] = values
    try:
        return captured.fast_paths.call(standing)
    finally:
        if before is None:
            captured.under_way.pop(thread, None)
        else:
            captured.under_way[thread] = before


def _straight(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the body at once: the budget says that this call is not looked at. Fast paths were tried before, unless the
    call gives arguments by name."""
    counters = captured.log.counters
    captured.budget.resting -= 1
    counters.body_runs += 1
    counters.eager_calls += 1
    return captured.body()(*args, **kwargs)


def pass_by(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of an object of which nothing is known, where those before it came and went (``Lives``). ``captured``
    stands for all of them."""
    if run.active_watch() is not None or not current_config().enabled:
        return _inline(captured, args, kwargs)
    counters = captured.log.counters
    counters.body_runs += 1
    counters.eager_calls += 1
    return captured.function(*args, **kwargs)


def _named(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that a fast path fits once its arguments are bound."""
    try:
        values = captured.bind(args, kwargs)
    except TypeError:
        return MISS  # the body raises its own
    return captured.fast_paths.call(values)


def _inline(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Somebody else watches or records what the body does, or capturing is switched off."""
    watch, around = run.active_watch(), foreign()
    counters = captured.log.counters
    if watch is not None:
        watch.trace.inlined.append(
            Inlined(function=captured.annotation.function, where=source_location.user_location())
        )
    elif not current_config().enabled:
        counters.inline_calls += 1
        begin = time.perf_counter()
        result = captured.body()(*args, **kwargs)
        captured.log.eager_ms.append((time.perf_counter() - begin) * 1e3)
        return result
    elif around is not None:
        counters.eager_calls += 1
        _report_foreign(captured, around)
        return captured.body()(*args, **kwargs)
    counters.inline_calls += 1
    return captured.body()(*args, **kwargs)


def _report_foreign(captured: Captured, around: str) -> None:
    """Say once what is around this call: rules take longer than many a body. Raises each time where asked to."""
    plan = captured.foreign.get(around)
    if plan is None:
        plan = captured.foreign[around] = compile_plan(captured.annotation, captured.bare_facts(around=around))
    elif captured.annotation.fallback != "error" and not current_config().refuse:
        return
    captured.report(plan)


def dispatch(
    captured: Captured, values: Values, now: Here, step: Callable[..., Any] | None = None, *rest: Any
) -> Any:  # fmt: skip
    """A call with its arguments bound, as eager does it whatever goes wrong in this library. ``step``: what else than
    the general way it takes."""
    if captured.faults > MOST_FAULTS:
        return run_eagerly(captured, captured.call(values, []), "something here goes wrong in every call")
    return guarded(captured, values, _dispatch if step is None else step, now, *rest)


def _dispatch(captured: Captured, values: Values, now: Here) -> Any:
    """Find the entry for the key of a call."""
    try:
        by_number = find_lifted(captured, values, now) if captured.lifted else None
    except (Unkeyable, TypeError) as error:
        return _unkeyable(captured, values, str(error))
    if by_number is not None and (result := call_lifted(captured, by_number, values, now)) is not MISS:
        return result
    try:
        entry, leaves = find_entry(captured, values, now.ambient)
    except (Unkeyable, TypeError) as error:
        return _unkeyable(captured, values, str(error))
    captured.faults = 0
    if entry.phase == "ready" and entry.nodes:
        measured = entry.payoff if is_measured(captured, entry) else None
        if measured is None or not measured.wants_body:
            goes_on = _GoesOn(captured, entry)
            standing = values if captured.decisions is None else captured.decisions.standing(values)
            captured.fast_paths.add(captured, standing, leaves, entry, now, goes_on, on_trial=measured is not None)
    return _go_on(captured, entry, values, leaves)


def _unkeyable(captured: Captured, values: Values, reason: str) -> Any:
    bound = captured.call(values, [])
    captured.report(compile_plan(captured.annotation, captured.bare_facts(opaque=(bound.unkeyable(reason),))))
    return run_eagerly(captured, bound, "an argument has neither a value nor an identity to compare")


# ------------------------------------------------------------------------------------------------------- by the phase


def _go_on(
    captured: Captured, entry: Entry, values: Values, leaves: list[Leaf], begin: Callable[[], Reply] = lambda: GO_ON
) -> Any:  # fmt: skip
    """The result of a call that has its entry. ``begin``: what comes before its stages."""
    entry = entry.in_use()
    if (run_now := body_run.current()) is not None:
        run_now.entry, run_now.leaves = entry, leaves
    region = entry.region
    if region is not None and region.obstacle is not None and entry.phase != "eager":
        give_up_gradients(captured, entry, region.uses, region.obstacle)
    reply = begin()
    while reply.verdict is Verdict.GO_ON:
        reply = _STAGES[entry.phase](captured, entry, values, leaves)
    if reply.verdict is Verdict.DONE:
        return finish(reply.result, leaves)
    assert reply.verdict is Verdict.START_OVER
    if run_now is not None and run_now.starts_over() > MOST_STARTS:
        raise CaptureBug("a call is started over again and again, and its key stays what it is")
    now = here()
    assert now is not None  # as at the beginning of the call
    return _dispatch(captured, captured.completed(values), now)


def _eager(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Reply:
    """This key cannot be recorded, as far as it was seen."""
    if entry.may_change and captured.budget.allows(entry.key, lasting=True):
        entry.trusts_store = False
        enter(captured, entry, "cold")
        return GO_ON
    if entry.plan is not None:
        captured.report(entry.plan)  # raises every time where the annotation asks for an error
    return done(run_eagerly(captured, captured.call(values, leaves, entry), "this key cannot be recorded"))


def _prepare(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Reply:
    """A cold or warm entry has nothing to replay yet."""
    if entry.phase == "cold" and captured.budget.refuses(entry.key):  # to look at state takes longer than many a body
        return done(run_without_key(captured, entry, captured.call(values, leaves, entry)))
    if decisions.begins_with_reads(captured, entry, captured.call(values, leaves, entry)):
        return START_OVER
    is_recorded_next = entry.phase == "warm" and not entry.warmups_left  # ``_miss`` looks, before the recording
    if not is_recorded_next and tells_apart(captured, entry, entry.places):
        return START_OVER
    bound, backend = captured.call(values, leaves, entry), engine_of(captured, entry, leaves)
    if backend is None:
        return GO_ON
    if backend.in_capture():
        return done(run_eagerly(captured, bound, kind="inline"))
    if entry.region is not None and entry.region.has_to_wait():
        return done(run_beside_threads(captured, bound, entry.region))
    tree = tree_for(backend, captured.pool.number)
    tree.begin_call(captured, captured.annotation.max_recordings)
    is_cold = entry.phase == "cold"
    if is_cold and given_numbers.meet_others(captured, entry, values):
        return START_OVER
    if is_cold and opens_numbers(captured, entry, bound, tree):
        return START_OVER
    if is_cold and captured.lifts_left and finds_numbers(captured, entry, bound, tree):
        return START_OVER
    if is_cold and captured.lifts_left and (result := lift(captured, entry, bound, tree)) is not MISS:
        return done(result)
    if is_cold and captured.decisions_left and decisions.begins(captured, entry, bound):
        return START_OVER
    if is_cold and arrays.begins(captured, entry, bound):
        return START_OVER
    if is_cold and entry.phase != "cold":
        return GO_ON
    if is_cold:
        if captured.hopeless is not None or not captured.budget.allows(entry.key):
            return done(run_without_key(captured, entry, bound))
        if captured.decisions is not None or captured.computed:
            entry.trusts_store = False  # a watched run has to show what comes of numbers
            if captured.decisions is not None and captured.decisions.forbids(values):
                return done(run_eagerly(captured, bound, "a number counts for more than a choice of ways"))
        phase = load(captured, entry, leaves)
        if phase == "cold":
            return done(_first_look(captured, entry, bound, tree))
        if phase == "eager":
            return GO_ON
    if entry.warmups_left > 0 or tree.warm:
        entry.warmups_left = max(entry.warmups_left - 1, 0)
        return done(warm_up(captured, bound, tree))
    enter(captured, entry, "ready")
    return GO_ON


def _match(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Reply:
    """A ready entry: replay the recording that follows on those of this step, or make it."""
    assert entry.backend is not None
    if entry.backend.in_capture():
        return done(run_eagerly(captured, captured.call(values, leaves), kind="inline"))
    tree = tree_for(entry.backend, captured.pool.number)
    if tree.path or tree.warm or tree.buried or tree.lingering:
        tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    pattern = tree.pattern(leaves)
    if tree.warm and not (starts_over(captured, entry, tree, pattern) and not tree.has_warm(leaves)):
        return done(warm_up(captured, captured.call(values, leaves), tree, entry))
    node = None if tree.warm else fitting(captured, entry, tree, pattern)
    if node is None and starts_over(captured, entry, tree, pattern):
        tree.end_path("elsewhere", tree.root.latest_children.get(entry.number))
        return GO_ON
    if node is None:
        return _miss(captured, entry, captured.call(values, leaves, entry), tree, pattern)
    state, config = node.check(leaves), current_config()
    if tree.lingering and (state or node.reads or config.poison or verifies(captured)):
        tree.let_go()
        return GO_ON
    if state == OVERLAPS:
        return done(_overlapping(captured, entry, values, leaves))
    return _timed(captured, entry, node, values, leaves, tree, is_moved=bool(state))


def _timed(
    captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree, *, is_moved: bool
) -> Reply:  # fmt: skip
    """Replay, and find out whether that is faster than the body. ``is_moved``: its state lies elsewhere, or changed.
    Where it does in call after call, pointing the recording there is a part of what a replay costs."""
    timing, begun = entry.payoff, body_run.current()
    go_on = _state_moved if is_moved else _replayed
    if begun is None or not is_measured(captured, entry):
        return go_on(captured, entry, node, values, leaves, tree)
    if timing.wants_body:
        return done(measure_body(captured, entry, captured.call(values, leaves), tree))
    before, clock = captured.log.counters.replays, payoff.clock_of(entry)
    search, begin = payoff.clock() - begun.begun, clock()
    reply = go_on(captured, entry, node, values, leaves, tree)
    if captured.log.counters.replays == before + 1:
        timing.note_replay(search + clock() - begin)
    return reply


def _replayed(captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree) -> Reply:
    captured.budget.looked_and_replayed()
    if node.reads:
        return _follow(captured, entry, node, values, leaves, tree)
    return done(replay_checked(captured, entry, node, values, leaves, tree))


_STAGES = {"cold": _prepare, "warm": _prepare, "ready": _match, "eager": _eager}


# --------------------------------------------------------------------------- the first run, and arguments that overlap


def _first_look(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Nothing is known: watch this run, within the limit."""
    if not eviction.makes_room(captured, entry, tree):
        return run_at_limit(captured, entry, bound, tree)
    other = entry.overlapping
    if other is not None and inputs.shares_with_state(bound, other.plans()):
        return _overlapping(captured, entry, bound.values, bound.leaves)
    return observe_call(captured, entry, bound, tree)


def _overlapping(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Any:
    """An argument shares memory with state, and a copy of it would hide a write: watched once, then eager."""
    if entry.overlapping is None:
        entry.overlapping = Entry((*entry.key, "overlaps state"))
    if entry.overlapping.phase in ("cold", "eager"):
        return _go_on(captured, entry.overlapping, values, leaves)
    bound = captured.call(values, leaves)
    return run_eagerly(captured, bound, "an argument shares memory with state that is written")


# -------------------------------------------------------------------------------------------- recordings of this entry


def _miss(captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern) -> Reply:
    """No recording fits: make one, within the limit."""
    if tree.lingering:  # so far only their parameters hold those gradients; an eager run may change that
        tree.let_go()
    if entry.region is not None and entry.region.has_to_wait():
        return done(run_beside_threads(captured, bound, entry.region))
    if not entry.is_proven and not captured.budget.allows(entry.key, begun=not entry.nodes):
        return done(run_given_up(captured, entry, bound))
    if (too_large := eviction.forecast(captured, entry, bound, tree)) is not None:
        return done(run_too_large(captured, bound, too_large))
    if not eviction.makes_room(captured, entry, tree):
        return done(run_at_limit(captured, entry, bound, tree, pattern))
    if inputs.shares_with_state(bound, entry.plans()):
        return done(_overlapping(captured, entry, bound.values, bound.leaves))
    if tells_apart(captured, entry, entry.places):
        return START_OVER
    shown = decisions.hold(captured, entry, bound)
    if shown is Verdict.EAGER:
        return done(run_eagerly(captured, bound, "more comes of a value than an answer"))
    if shown is Verdict.START_OVER:
        return START_OVER
    if not arrays.hold(captured, entry, bound):
        return START_OVER
    if is_read_once_more(entry, executes=tree.backend.executes_recording_runs):
        return done(read_once_more(captured, entry, bound, tree))
    if entry.nodes:
        captured.log.counters.misses += 1
        captured.log.add("miss", miss_reason.difference(captured, entry, bound, tree, pattern).difference)
    return _recorded(captured, entry, bound, tree, pattern)


def _recorded(captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern) -> Reply:
    make = functools.partial(record_call, captured, entry, bound, tree, pattern)
    return done(given_numbers.completed(captured, entry, bound, tree, pattern, make))


def _state_moved(captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree) -> Reply:
    """The recording that follows found its Python state elsewhere, or changed."""
    if finds_inputs(captured, entry, node.guard.places) or finds_moving(captured, entry, node):
        return START_OVER
    reply = rebind.state_moved(captured, entry, node, values, leaves, tree)
    if captured.sizes is not None:
        captured.sizes.clear()
    if reply.verdict is Verdict.REPLAY and node.reads:
        return GO_ON
    if reply.verdict is Verdict.REPLAY:
        return done(replay_checked(captured, entry, node, values, leaves, tree, reply.learned))
    return after_move(captured, entry, node, values, leaves, tree, reply)


# ------------------------------------------------------------------------------------- branches by what the host reads


def _follow(captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree) -> Reply:
    """Run recordings segment by segment. Where none goes on after what was read, nothing has happened."""
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    siblings = tree.current.children[node.key]
    if any(verify.is_due(captured, sibling) for sibling in siblings if sibling.reads):
        bound = captured.call(values, leaves, entry)
        verified = verify.verified(captured, entry, node, tree, bound)
        if verified.is_wrong and node.given is not None:
            given_numbers.give_up(captured)
        elif verified.differs is not None:
            note_difference(captured, entry, tree, verified.differs, is_wrong=verified.is_wrong)
        if verified.stopped is None:
            return done(verified.result if verified.has_result else verify.run_body(captured, bound))
        stopped = verified.stopped
    else:
        stopped = branches.replay(captured, node, tree, values, leaves, body_run.current())
    return _came_to(captured, entry, node, stopped, values, leaves, tree)


def _came_to(
    captured: Captured, entry: Entry, node: Node, stopped: branches.Followed, values: Values, leaves: list[Leaf],
    tree: Tree,
) -> Reply:  # fmt: skip
    """Recordings went as far as they go: to a result, or to a value after which none goes on."""
    if stopped.node is not None:
        entry.steadiness.replays += 1
        if stopped.node.given is not None:
            stopped.node.given.count.calls += 1
        return done(stopped.result)
    if stopped.ran:
        islands.answer(body_run.current(), stopped.ran)
    if stopped.raises:
        entry.steadiness.note_stop("[]", is_new=False)
        return done(run_eagerly(captured, captured.call(values, leaves, entry), "what it computes of a value raises"))
    if stopped.is_odd:
        return _after_island(captured, entry, stopped, captured.call(values, leaves, entry), tree)
    if stopped.moved is not None:
        return _state_moved(captured, entry, stopped.moved, values, leaves, tree)
    bound = captured.call(values, leaves, entry)
    return _unread(captured, entry, node, stopped.reads, bound, tree, again=not stopped.ran)


def _after_island(captured: Captured, entry: Entry, stopped: branches.Followed, bound: Call, tree: Tree) -> Reply:
    """An island ran that no recording can go on from: the body goes on, with what it gave."""
    captured.log.counters.misses += 1
    captured.log.add("miss", f"after {islands.name_of(stopped.ran[-1].function)}() no recording can go on")
    entry.steadiness.note_stop("[]", is_new=False)
    if stopped.is_lost:
        _tell_lost_state(captured, islands.name_of(stopped.ran[-1].function))
    if entry.steadiness.is_lost:
        reply = give_up_reads(captured, entry, tree)
        if stopped.interrupt is None:
            return reply
    result = run_eagerly(captured, bound, "after an island no recording can go on")
    if stopped.interrupt is not None:
        raise stopped.interrupt
    return done(result)


def _tell_lost_state(captured: Captured, name: str) -> None:
    """No eager call can be made of this one: what the body had read by then is another thing now."""
    obstacle = "changed, for the first time, what the body reads before it: this one call may differ from eager"
    told = Island(name=name, where=captured.annotation.defined_at, obstacle=obstacle, fix="order")
    captured.report(compile_plan(captured.annotation, captured.bare_facts(islands=(told,))))


def _unread(
    captured: Captured, entry: Entry, node: Node, reads: branches.Reads, bound: Call, tree: Tree, *, again: bool = True
) -> Reply:  # fmt: skip
    """The host read a value after which no recording goes on from here. ``again``: others may begin anew."""
    for sibling in siblings_after(reads, node, tree) if again else ():
        state = sibling.check(bound.leaves)
        if state and state != OVERLAPS:
            return _state_moved(captured, entry, sibling, bound.values, bound.leaves, tree)
        arguments = bound.values, bound.leaves, body_run.current()
        stopped_replay = None if state else branches.replay(captured, sibling, tree, *arguments)
        if stopped_replay is not None and (stopped_replay.node is not None or stopped_replay.raises):
            return _came_to(captured, entry, sibling, stopped_replay, bound.values, bound.leaves, tree)
    captured.log.counters.misses += 1
    captured.log.add("miss", f"the host read {', '.join(reads)[-80:]}, for the first time")
    known = captured.decisions
    asks = reads[-1].startswith(ASKED) or (known is not None and known.takes(reads, asks=True))
    if asks and not decisions.proves_branch(captured, entry, bound, reads):
        entry.steadiness.note_stop(reads[-1], is_new=False)
        return done(run_eagerly(captured, bound, "more comes of a value than an answer"))
    branches_known = [branch for branch_reads, branch in entry.known_branches() if branch_reads[: len(reads)] == reads]
    entry.steadiness.note_stop(reads[-1], is_new=not branches_known)
    if entry.steadiness.is_lost:
        return give_up_reads(captured, entry, tree)
    if not captured.budget.allows(entry.key):
        return done(run_given_up(captured, entry, bound))
    if any(branch.plan is not None and branch.plan.outcome == "eager" for branch in branches_known):
        return done(run_eagerly(captured, bound, "what the body does after this value cannot be recorded"))
    reads_others = captured.decisions is not None and captured.decisions.reads_others
    if reads_others and not decisions.proves_branch(captured, entry, bound, reads):
        return done(run_eagerly(captured, bound, "after this value more comes of a number than an answer"))
    if branches_known and not arrays.hold_after(captured, entry, bound, reads):
        return done(run_eagerly(captured, bound, "after this value more comes of an array than tensors"))
    if branches_known:
        return _recorded(captured, entry, bound, tree, node.key[1])
    if len(entry.branches) >= MOST_BRANCHES:
        return done(run_eagerly(captured, bound, "there are as many branches as there may be"))
    return done(observe_call(captured, entry, bound, tree))


# ----------------------------------------------------------------------------------------------- calls that are padded


def _call_of_size(captured: Captured, values: Values, size: Size, now: Here, *, is_plain: bool) -> Any:
    """A call that may be padded to a size which is recorded."""
    if size.rest:
        size.rest -= 1
        result = captured.fast_paths.call(values) if is_plain else MISS
        return result if result is not MISS else dispatch(captured, values, now)
    result = size.replayed(values) if is_plain else MISS
    if result is not MISS:
        size.calls -= 1  # it has counted the call
        return result
    return dispatch(captured, values, now, _padded_or_not, size)


def _padded_or_not(captured: Captured, values: Values, now: Here, size: Size) -> Any:
    result = replay_padded(captured, values, now, size)
    return _dispatch(captured, values, now) if result is MISS else result


# ------------------------------------------------------------------------------------- what the fast path goes on with


def _ready(
    captured: Captured, values: Values, entry: Entry, leaves: list[Leaf], begin: Callable[[], Reply] = lambda: GO_ON
) -> Any:  # fmt: skip
    return _go_on(captured, entry, values, leaves, begin)


@frozen(eq=False)
class _GoesOn:
    """What the fast path goes on with, in Python."""

    captured: Captured
    entry: Entry

    @property
    def attach(self) -> Callable[..., Any] | None:
        """A function that makes the call's result of what C replayed; None where nothing has to be done."""
        return None if self.entry.region is None else self.entry.region.attach

    def replay(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf]) -> Any:
        """Run a recording that was found to fit."""
        values = self.captured.own_values(values)
        if node.reads:
            return self._read_through(node, tree, values, leaves)
        return finish(replay(self.captured, node, tree, values, leaves, None), leaves)

    def _read_through(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf]) -> Any:
        """Run a recording that reads values in one go, if it can be, and as far as they come again."""
        captured, entry, outputs = self.captured, self.entry, node.outputs
        is_plain = outputs is not None and outputs.in_line is not None and captured.annotation.verify == "off"
        if not is_plain or tree.lingering or entry.payoff.wants_body:
            return self._follow(node, tree, values, leaves)
        try:
            try:
                result = replay(captured, node, tree, values, leaves, None)
            except native.Parted as error:
                return self._follow(node, tree, values, leaves, error.args)
        except BaseException:
            branches.put_back(node)
            raise
        entry.steadiness.replays += 1
        return finish(result, leaves)

    def _follow(
        self, node: Node, tree: Tree, values: Values, leaves: list[Leaf], begun_at: tuple[int, Any] | None = None
    ) -> Any:  # fmt: skip
        """The same where the host reads values. What begins with a recording that fits may end in one that has to be
        verified first. ``begun_at``: see ``branches.replay``."""
        captured, entry, run_now = self.captured, self.entry, BodyRun()
        is_due = node.given is not None and node.given.count.is_due
        if tree.lingering or is_due or captured.annotation.verify != "off":
            return self._begun_anew(node, values, leaves)
        measured = entry.payoff if is_measured(captured, entry) else None
        if measured is not None and measured.wants_body:
            return self._begun_anew(node, values, leaves)
        clock = payoff.clock_of(entry)
        begun = 0.0 if measured is None else clock()
        try:
            stopped = branches.replay(captured, node, tree, values, leaves, run_now, begun_at=begun_at)
        except Exception as error:
            if run_now.replayed or run_now.error is error or is_interrupt(error):
                raise
            return self._begun_anew(node, values, leaves)  # nothing has happened yet
        if stopped.node is None:
            begin = lambda: _came_to(captured, entry, node, stopped, values, leaves, tree)  # noqa: E731
            return guarded(captured, values, _ready, entry, leaves, begin)
        entry.steadiness.replays += 1
        if stopped.node.given is not None:
            stopped.node.given.count.calls += 1
        if measured is not None and not measured.paths:  # else C times it
            measured.note_replay(clock() - begun)
        return finish(stopped.result, leaves)

    def _begun_anew(self, node: Node, values: Values, leaves: list[Leaf]) -> Any:
        """Have the general way take a call, of which nothing is left that a replay of this recording did."""
        branches.put_back(node)
        return self.ready(self.entry, values, leaves)

    def tell(self, errors: list[BaseException]) -> None:
        """Report exceptions that came in the middle of a replay, which was completed all the same."""
        tell(self.captured, errors)

    def raised(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf], error: BaseException) -> Any:
        """A replay ended in an error."""
        values = self.captured.own_values(values)
        if type(error) is native.Parted:
            return self._follow(node, tree, values, leaves, error.args)
        commit = Commit(self.captured, node, tree, values, leaves)
        if not commit.was_stopped():
            raise error
        return commit.resumed(error, None)

    def ready(self, entry: Entry, values: Values, leaves: list[Leaf]) -> Any:
        """The recording that follows relies on state that is another now, or the body is to be measured. Some of that
        state is a mode, such as a block that keeps parametrized weights."""
        if here() is None:
            return MISS
        values = self.captured.own_values(values)
        if not entry.payoff.wants_body:
            return guarded(self.captured, values, _ready, entry, leaves)
        if not is_measured(self.captured, entry):
            return MISS
        return guarded(self.captured, values, body_in_place, entry, leaves)
