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
starts a call over or writes a phase: ``_enter`` does, ``run_eagerly`` and ``_go_on``. An entry moves

    cold -> warm -> ready      as planned
    cold -> ready              by a plan from the store, which the recording checks
    any  -> cold               what was known does not hold: ``_forget``, ``planning.replace``
    any  -> warm               a recording run was none, or another than planned, and may come out the next time
    any  -> eager              the plan says so, the runs never settle, or a replay was found to be wrong

``Verdict`` says how a call goes on after a stage: ``DONE`` with its result; ``REPLAY`` what was found; ``OBSERVE`` or
``EAGER`` instead; ``GO_ON``: as the entry has another phase or other recordings now, ask by those; ``START_OVER``: the
key has other parts now, which only a new look at the call tells.

Where results need gradients, what is watched and recorded is the forward pass (``training_region``): this module has
its results made part of the caller's graph, and autograd calls the backward pass, a captured function of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from attrs import evolve, frozen

from capture.core.config import current as current_config
from capture.core.errors import CaptureBug, CaptureError, UncapturableError
from capture.core.facts import (
    BucketRefusal,
    Facts,
    GradientObstacle,
    GradientUse,
    Inlined,
    Island,
    LimitReached,
    MemoryForecast,
    SlowReplay,
    Verification,
)
from capture.core.findings import Severity
from capture.core.interrupts import is_interrupt
from capture.core.plan import CapturePlan
from capture.engines.base import Backend, Move
from capture.engines.registry import backend_for
from capture.guards.guard import OVERLAPS
from capture.guards.read_guards import Places
from capture.key.modes import Ambient, Here, ambient, foreign, here, inlined
from capture.key.pytree import result_leaves
from capture.key.signature import Leaf, Leaves, Unkeyable, deaths, forget_module_structure
from capture.native import MISS
from capture.observe import islands, run, source_location
from capture.observe.capture_lock import locked
from capture.rules.compile_plan import compile_plan
from capture.runtime import (
    branches,
    bucket_proof,
    eviction,
    fault,
    inputs,
    key_difference,
    miss_reason,
    numbers,
    payoff,
    planning,
    rebind,
    record,
    record_failure,
    verify,
)  # fmt: skip
from capture.runtime.bucket_proof import NOT_RECORDED, PaddedCall, PaddedNode
from capture.runtime.buckets import Count, Size, Trim, Values, way_of
from capture.runtime.budget import AT_LIMIT
from capture.runtime.captured import Captured
from capture.runtime.entry import MOST_BRANCHES, MOST_STOPS, RETRIES, Entry, Phase, drop_dead, drop_unused
from capture.runtime.fast_path import Shortcuts
from capture.runtime.replay import Commit, replay, tell
from capture.runtime.training_region import Region, finish
from capture.runtime.verdict import GO_ON, START_OVER, Outcome, Reply, Verdict, done
from capture.state import body_run, snapshot
from capture.state.body_run import BodyRun
from capture.state.call import Call
from capture.tree.node import Node, Pattern
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree

_lifting = threading.Lock()
_MOST_LIFTED = 15  # of one function: for its shapes, modes and threads
_MOST_WAYS = 4  # of one size: for some modes or plain values each
_MOST_FAULTS = 8  # calls in a row that have no key, as something goes wrong on the way to it


# -------------------------------------------------------------------------------------------------- from call to entry


def call(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call, in the caller's own form. The steps are in the order of their cost."""
    if captured.budget.resting and run.active_watch() is None:
        return _straight(captured, args, kwargs)
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
        for one in tuple(captured.lifted):
            result = one.replayed(values)
            if result is not MISS:
                return result
    result = captured.fast_paths.call(values) if is_plain else MISS
    return result if result is not MISS else dispatch(captured, values, now)


def _straight(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing is gained by looking at this call. Fast paths were tried before."""
    counters = captured.log.counters
    captured.budget.resting -= 1
    counters.body_runs += 1
    counters.eager_calls += 1
    return captured.body()(*args, **kwargs)


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
        captured.report(compile_plan(captured.annotation, captured.bare_facts(around=around)))
        return captured.body()(*args, **kwargs)
    counters.inline_calls += 1
    return captured.body()(*args, **kwargs)


def dispatch(
    captured: Captured, values: Values, now: Here, step: Callable[..., Any] | None = None, *rest: Any
) -> Any:  # fmt: skip
    """A call with its arguments bound, as eager does it whatever goes wrong in this library. ``step``: what else than
    the general way it takes."""
    if captured.faults > _MOST_FAULTS:
        return run_eagerly(captured, captured.call(values, []), "something here goes wrong in every call")
    return _guarded(captured, values, _dispatch if step is None else step, now, *rest)


def _guarded(captured: Captured, values: Values, step: Callable[..., Any], *rest: Any) -> Any:
    """The one place where errors of this library are told from those of the body, which come out as they are, and from
    those that options ask for."""
    run = BodyRun(begun=payoff.clock())
    try:
        return _told_apart(captured, values, run, step, *rest)
    finally:
        islands.settle(run)


def _told_apart(captured: Captured, values: Values, run: BodyRun, step: Callable[..., Any], *rest: Any) -> Any:
    try:
        return body_run.during(run, step, (captured, values, *rest))
    except Exception as error:
        asked_for = isinstance(error, CaptureError) and not isinstance(error, CaptureBug)
        if isinstance(error, UncapturableError) and run.error is not error:
            captured.log.counters.refused_calls += 1
        if run.error is error or asked_for or is_interrupt(error) or current_config().strict:
            raise
        found = error
    return _after_fault(captured, values, run, found)


def _after_fault(captured: Captured, values: Values, run: BodyRun, error: Exception) -> Any:
    """End a call in which something of this library went wrong: by what the body gave, or by running it now."""
    entry: Entry | None = run.entry
    has_result, result = run.has_ended and run.is_own, run.result
    may_run = not run.runs and not run.replayed
    try:
        if entry is None:
            captured.faults += 1
        elif entry.backend is not None:
            tree = tree_for(entry.backend)
            if run.watched is not None and run.error is None and not (has_result or run.replayed):
                has_result, result = record_failure.after_fault(run.watched, tree, has_ended=run.has_ended)
                result = finish(result, run.watched.call.leaves)
                may_run = may_run or not tree.backend.executes_recording_runs
            _start_over_after_fault(captured, entry, tree)
        _tell_fault(captured, error, entry)
    except UncapturableError:  # as the annotation asks
        raise
    except Exception as another:  # noqa: BLE001 - nothing here may stop the call
        captured.faults = _MOST_FAULTS + 1
        fault.log(captured, another)
    if not run.replayed and (run.error is not None or has_result or not may_run):
        captured.log.counters.eager_calls += 1
    if run.error is not None:
        raise run.error
    if has_result:
        return finish(result, run.leaves)
    if not may_run:  # what it did so far cannot be undone
        raise error
    return run_eagerly(captured, captured.call(values, []), "something went wrong inside this library")


def _start_over_after_fault(captured: Captured, entry: Entry, tree: Tree) -> None:
    """Nothing that is known of this key is relied on any more."""
    entry.faults += 1
    _forget(captured, entry, tree)


def _tell_fault(captured: Captured, error: Exception, entry: Entry | None = None) -> None:
    """Say it once. Calls in which something goes wrong again and again stay eager."""
    fault.log(captured, error)
    plan = compile_plan(captured.annotation, captured.bare_facts(fault=fault.describe(error)))
    if entry is not None and entry.faults > RETRIES:
        entry.plan, entry.may_change = plan, False
        _enter(captured, entry, "eager")
    captured.report(plan)


def give_up(captured: Captured, error: Exception) -> None:
    """Nothing can be known of this function's calls: all of them run eagerly."""
    captured.faults = _MOST_FAULTS + 1
    _tell_fault(captured, error)


def _dispatch(captured: Captured, values: Values, now: Here) -> Any:
    """Find the entry for the key of a call."""
    try:
        if captured.lifted and (result := _with_its_numbers(captured, values, now)) is not MISS:
            return result
        entry, leaves = _entry_of(captured, values, now.ambient)
    except (Unkeyable, TypeError) as error:
        return _unkeyable(captured, values, str(error))
    captured.faults = 0
    if entry.phase == "ready" and entry.nodes:
        measured = entry.payoff if _is_measured(captured, entry) else None
        if measured is None or not measured.wants_body:
            goes_on = _GoesOn(captured, entry)
            on_trial = measured is not None and not entry.has_reads  # else what goes on in Python is timed there
            captured.fast_paths.add(captured, values, leaves, entry, now, goes_on, on_trial=on_trial)
    return _go_on(captured, entry, values, leaves)


def entry_of(captured: Captured, values: Values) -> tuple[Entry, list[Leaf]]:
    """The entry of a call as things stand now, and its dynamic leaves.

    Raises ``Unkeyable`` or ``TypeError`` for unhashable values.
    """
    return _entry_of(captured, values, ambient())


def _entry_of(captured: Captured, values: Values, modes: Ambient) -> tuple[Entry, list[Leaf]]:
    leaves = Leaves()
    if not captured.optimizers.has_looked:  # once, also where no call ever gets a key
        state = snapshot.snapshot(captured.call(values, leaves).roots())
        captured.optimizers.note(state, captured.function, (captured.receiver, *values))
    arguments = captured.arguments(values, leaves)  # first: it may open objects, which then have a part of their own
    key = (modes, arguments, *(() if captured.stateless else captured.rest(values)))
    family = captured.families.get(key)
    if family is None:
        if captured.deaths_seen != deaths():
            captured.deaths_seen = deaths()
            captured.budget.lose(drop_dead(captured.families))
        drop_unused(captured.families, most=2 * captured.annotation.max_recordings + 8)
        family = captured.families[key] = inputs.family_of(leaves)
    pattern = inputs.alias_pattern(leaves, family.spans) if len(leaves) > 1 else ()
    entry = family.find(pattern, leaves)
    if entry is None:
        entry = family.add(Entry((*key, pattern), shares_memory=bool(pattern)), pattern, leaves)
    return entry.in_use(), leaves


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
        _put_together(captured, entry, region.uses, region.obstacle)
    reply = begin()
    while reply.verdict is Verdict.GO_ON:
        reply = _STAGES[entry.phase](captured, entry, values, leaves)
    if reply.verdict is Verdict.DONE:
        return finish(reply.result, leaves)
    assert reply.verdict is Verdict.START_OVER
    now = here()
    assert now is not None  # as at the beginning of the call
    return _dispatch(captured, captured.completed(values), now)


def _enter(captured: Captured, entry: Entry, phase: Phase) -> None:
    """The one place that moves an entry to a phase. Why one goes eager is said, or raised as the annotation asks."""
    entry.advance(phase)
    if phase == "eager" and entry.plan is not None:
        captured.report(entry.plan)


def _eager(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Reply:
    """This key cannot be recorded, as far as it was seen."""
    if entry.may_change and captured.budget.allows(entry.key, lasting=True):
        entry.trusts_store = False
        _enter(captured, entry, "cold")
        return GO_ON
    if entry.plan is not None:
        captured.report(entry.plan)  # raises every time where the annotation asks for an error
    return done(run_eagerly(captured, captured.call(values, leaves, entry), "this key cannot be recorded"))


def _prepare(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Reply:
    """A cold or warm entry has nothing to replay yet."""
    if _tells_apart(captured, entry, entry.places):
        return START_OVER
    bound, backend = captured.call(values, leaves, entry), engine_of(captured, entry, leaves)
    if backend is None:
        return GO_ON
    if backend.in_capture():
        return done(run_eagerly(captured, bound, kind="inline"))
    tree = tree_for(backend)
    tree.begin_call(captured, captured.annotation.max_recordings)
    is_cold = entry.phase == "cold"
    if is_cold and captured.lifts_left and (result := _lift(captured, entry, bound, tree)) is not MISS:
        return done(result)
    if is_cold and entry.phase != "cold":
        return GO_ON
    if is_cold:
        if captured.hopeless is not None or not captured.budget.allows(entry.key):
            return done(_no_new_key(captured, entry, bound))
        phase = load(captured, entry, leaves)
        if phase == "cold":
            return done(_first_look(captured, entry, bound, tree))
        if phase == "eager":
            return GO_ON
    if entry.warmups_left > 0 or tree.warm:
        entry.warmups_left = max(entry.warmups_left - 1, 0)
        return done(_warm_up(captured, bound, tree))
    _enter(captured, entry, "ready")
    return GO_ON


def _match(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Reply:
    """A ready entry: replay the recording that follows on those of this step, or make it."""
    assert entry.backend is not None
    if entry.backend.in_capture():
        return done(run_eagerly(captured, captured.call(values, leaves), kind="inline"))
    tree = tree_for(entry.backend)
    if tree.path or tree.warm or tree.buried or tree.lingering:
        tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    pattern = tree.pattern(leaves)
    if tree.warm and not (_starts_over(captured, entry, tree, pattern) and not tree.has_warm(leaves)):
        return done(_warm_up(captured, captured.call(values, leaves), tree, entry))
    node = None if tree.warm else _fitting(captured, entry, tree, pattern)
    if node is None and _starts_over(captured, entry, tree, pattern):
        tree.end_path("elsewhere", tree.root.latest_children.get(entry.number))
        return GO_ON
    if node is None:
        return _miss(captured, entry, captured.call(values, leaves, entry), tree, pattern)
    state, config = node.check(leaves), current_config()
    if tree.lingering and (state or node.reads or config.poison or _verifies(captured)):
        tree.let_go()
        return GO_ON
    if state == OVERLAPS:
        return done(_overlapping(captured, entry, values, leaves))
    return _timed(captured, entry, node, values, leaves, tree, is_moved=bool(state))


def _starts_over(captured: Captured, entry: Entry, tree: Tree, pattern: Pattern) -> bool:
    """This call begins a step of its own. A backward pass belongs behind its forward pass."""
    return not captured.is_backward and tree.may_start_over(entry.nodes, entry.number, pattern)


def _timed(
    captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree, *, is_moved: bool
) -> Reply:  # fmt: skip
    """Replay, and find out whether that is faster than the body. ``is_moved``: its state lies elsewhere, or changed.
    Where it does in call after call, pointing the recording there is a part of what a replay costs."""
    found, begun = entry.payoff, body_run.current()
    go_on = _state_moved if is_moved else _replayed
    if begun is None or not _is_measured(captured, entry):
        return go_on(captured, entry, node, values, leaves, tree)
    if found.wants_body:
        return done(_measure_body(captured, entry, captured.call(values, leaves), tree))
    before = captured.log.counters.replays
    reply = go_on(captured, entry, node, values, leaves, tree)
    if captured.log.counters.replays == before + 1:
        found.note_replay(payoff.clock() - begun.begun)
    return reply


def _replayed(captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree) -> Reply:
    if node.reads:
        return _follow(captured, entry, node, values, leaves, tree)
    return done(_replay(captured, entry, node, values, leaves, tree))


def _is_measured(captured: Captured, entry: Entry) -> bool:
    """Replays of this entry are to be compared with its body, which a call may run in its place. A device of its own
    works on while the host goes on, so there replays are measured where the host reads values alone."""
    if not entry.payoff.is_open or captured.is_backward or entry.backend is None:
        return False
    if entry.backend.has_own_memory and (entry.region is not None or not entry.has_reads):
        return False
    settings = current_config()
    if not settings.drop_slow or settings.poison or _verifies(captured):
        return False
    return entry.plan is None or not entry.plan.collectives


def _measure_body(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Run the body in the place of a replay. The rest of the step runs eagerly, too: recordings of others that follow
    on this one's would be made again."""
    begin = payoff.clock()
    result = run_eagerly(captured, bound, "to be compared with how long replays take", kind="measured")
    seconds = payoff.clock() - begin
    if entry.region is not None:
        entry.region.time_backward(result, bound.leaves, is_replay=False)
    entry.payoff.note_body(seconds)
    if entry.region is not None and not entry.payoff.is_open:
        entry.region.stop_timing()
    _note_warm(captured, result, bound, tree)
    if entry.payoff.loss:
        _does_not_pay(captured, entry, tree)
    return result


def _does_not_pay(captured: Captured, entry: Entry, tree: Tree) -> None:
    """Its replays are slower than the body: calls run eagerly, and are looked at again rarely."""
    found, left = entry.payoff, entry.plain or entry  # of a forward pass, what stands for all calls again
    names, where = captured.optimizers.names_of_islands(), captured.annotation.defined_at
    slow = SlowReplay(replay=found.replay * 1e6, body=found.body * 1e6, where=where, optimizers=names)
    captured.log.add("drop", "replays take longer than the body")
    captured.budget.spend("drops", found.loss * payoff.AFTER * 1e3, key=entry.key)
    _forget(captured, entry, tree)
    left.payoff = payoff.Payoff()
    left.plan = compile_plan(captured.annotation, captured.bare_facts(slow_replay=slow))
    _enter(captured, left, "eager")


def _fitting(captured: Captured, entry: Entry, tree: Tree, pattern: Pattern) -> Node | None:
    """The recording that may run now. One that would write in memory that somebody uses is dropped: it is made again
    beside that memory."""
    for node in tuple(tree.current.children.get((entry.number, pattern), ())):
        if node.dead_before and not node.may_run():
            continue
        if tree.lingering and node is not tree.awaited:
            tree.settle_gradients(node)
        if tree.is_clear(node):
            return node
        captured.log.add("drop", "it writes in memory that is still used")
        if node in entry.nodes:
            entry.nodes.remove(node)
        tree.forget(node)
    return None


_STAGES = {"cold": _prepare, "warm": _prepare, "ready": _match, "eager": _eager}


# --------------------------------------------------------------------------------------- an eager run, watched or not


def run_eagerly(
    captured: Captured,
    bound: Call,
    reason: str = "",
    *,
    kind: Literal["eager", "warm-up", "measured", "inline"] = "eager",
    weight: float = 1.0,
) -> Any:
    """The one place where a bound call runs its body eagerly, on the caller's own tensors. ``warm-up``: calls like this
    are recorded soon; ``measured``: it stands for a replay, to learn which of the two is faster; ``inline``: somebody
    else captures what it does, and neither counts nor watches are ours.
    ``weight``: as for ``Budget.ran_eagerly``."""
    log = captured.log
    if kind == "inline":
        log.counters.inline_calls += 1
        return bound.run_plainly()
    log.counters.body_runs += 1
    if kind == "warm-up":
        log.counters.warm_up_calls += 1
        with log.timed("warm-up"):
            return inlined(bound.run_plainly)
    if kind == "measured":
        log.counters.measured_calls += 1
    else:
        log.counters.eager_calls += 1
    log.add("measure" if kind == "measured" else "eager", reason)
    begin = time.perf_counter()
    try:
        return bound.run_plainly()
    finally:
        ms = (time.perf_counter() - begin) * 1e3
        log.eager_ms.append(ms)
        captured.budget.ran_eagerly(ms, weight=weight)


def _warm_up(captured: Captured, bound: Call, tree: Tree, entry: Entry | None = None) -> Any:
    """Asked for by ``warmup=``, or because a step that warms up is still open. ``entry``: what is to be measured is
    measured then."""
    if entry is not None and _is_measured(captured, entry) and entry.payoff.wants_body:
        return _measure_body(captured, entry, bound, tree)
    tree.note_chain(captured, bound.leaves)
    result = run_eagerly(captured, bound, kind="warm-up")
    _note_warm(captured, result, bound, tree)
    return result


def _note_warm(captured: Captured, result: Any, bound: Call, tree: Tree) -> None:
    tensors = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
    tree.note_warm(captured, [tensor for tensor in tensors if all(tensor is not leaf for leaf in bound.leaves)])


def engine_of(captured: Captured, entry: Entry, leaves: Sequence[Leaf]) -> Backend | None:
    """The engine for this call's device; without one the entry goes eager."""
    if entry.backend is not None:
        return entry.backend
    devices = {leaf.device for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.Generator))}
    receiver = captured.receiver
    if isinstance(receiver, torch.nn.Module):
        devices |= {tensor.device for tensor in receiver.parameters()}
    found = sorted((one for one in devices if one.type not in ("cpu", "meta")), key=str)
    device = found[0] if found else torch.device("cpu")
    entry.backend = backend_for(device)
    if entry.backend is None:
        entry.may_change = False
        entry.plan = compile_plan(captured.annotation, captured.bare_facts(backend_missing=device.type))
        _enter(captured, entry, "eager")
    return entry.backend


def load(captured: Captured, entry: Entry, leaves: Sequence[Leaf]) -> Phase:
    """Take a plan that was kept, if there is one. Gives the phase that a cold entry is in then."""
    _enter(captured, entry, planning.load(captured, entry, leaves))
    return entry.phase


def _first_look(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Nothing is known: watch this run, within the limit."""
    if not eviction.makes_room(captured, entry, tree):
        return _limit_reached(captured, entry, bound, tree)
    other = entry.overlapping
    if other is not None and inputs.shares_with_state(bound, other.plans()):
        return _overlapping(captured, entry, bound.values, bound.leaves)
    return _observe(captured, entry, bound, tree)


def _observe(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Watch one eager run, plan by what it showed, and give its result."""
    begin = time.thread_time()
    tree.note_chain(captured, bound.leaves)
    try:
        observed = planning.observe(captured, entry, bound)
    except BaseException as error:
        captured.log.counters.watched_calls += _is_own(error)
        raise
    finally:
        captured.budget.spend("observations", (time.thread_time() - begin) * 1e3, key=entry.key)
    captured.budget.note_operators(observed.facts.num_ops)
    tree = planning.on_its_device(entry, observed.facts, tree)
    if planning.shares_with_state(captured, observed.facts):  # says nothing about calls that do not
        entry.overlapping = entry = entry.overlapping or Entry((*entry.key, "overlaps state"))
    if _cuts_steps(captured, entry, tree, observed.facts):
        captured.log.counters.watched_calls += 1
        return observed.watched.result
    try:
        _plan(captured, entry, observed)
    except UncapturableError:
        run.undo(observed.watched)
        raise
    if entry.phase == "warm":
        fresh = [leaf.value for leaf in observed.described.outputs if leaf.kind == "fresh"]
        tree.note_warm(captured, fresh)
    if entry.phase == "eager":
        captured.log.counters.eager_calls += 1
    else:
        captured.log.counters.watched_calls += 1
    return observed.watched.result


def _cuts_steps(captured: Captured, entry: Entry, tree: Tree, facts: Facts) -> bool:
    """Optimizers whose steps read values, or compute numbers, that no recording has are islands from now on, or, where
    no recording can be cut for those, no more. What was recorded and planned before is dropped."""
    optimizers = captured.optimizers
    if any(one.obstacle for one in facts.islands) and optimizers.refuse_islands():
        told = "the step of an optimizer cannot run eagerly between two segments"
    elif tree.backend.runs_islands and branches.may_follow(captured, entry) and optimizers.make_islands():
        told = "the step of an optimizer is another one in each call: it runs eagerly between two segments from now on"
    else:
        if optimizers.is_lost:  # further branches would tell nothing more
            entry.steadiness.stops = max(entry.steadiness.stops, MOST_STOPS)
        return False
    captured.log.add("plan", told)
    captured.budget.keys.clear()  # keys have other parts from now on, and those are compared to say what changes
    _forget(captured, entry, tree)
    captured.retire()
    return True


def _is_own(error: BaseException) -> bool:
    """The body of this thread's call raised it."""
    run = body_run.current()
    return run is not None and run.error is error


def _plan(captured: Captured, entry: Entry, observed: planning.Observed) -> None:
    """Plan by what a watched run showed."""
    phase = planning.take(captured, entry, observed)
    if observed.facts.reads:
        entry.times_read[observed.facts.reads] += 1
    if phase == "eager" and observed.facts.reads and entry.nodes:  # other branches are recorded
        assert entry.plan is not None
        captured.report(entry.plan)
        return
    if phase is not None:
        _enter(captured, entry, phase)
        return
    # Nothing is in the way but that results need gradients. What is watched and recorded from now on is the forward
    # pass, and its backward pass beside it.
    assert entry.plan is not None
    captured.note_findings(entry.plan)
    captured.log.add("plan", "results need gradients: forward and backward are recorded apart")
    assert entry.backend is not None
    leaves, uses = observed.watched.call.leaves, observed.facts.gradients
    region = Region(captured, entry.backend, leaves, uses, entry.payoff)
    region.look_for_higher_order(observed.watched.result)
    entry.plan = None
    entry.with_region(region)


def _put_together(
    captured: Captured, entry: Entry, uses: Sequence[GradientUse], obstacle: GradientObstacle
) -> None:  # fmt: skip
    """Forward and backward cannot be recorded apart after all."""
    entry.retire()
    captured.clear_fast_paths()
    facts = captured.bare_facts(gradients=tuple(uses), gradient_obstacles=(obstacle,))
    entry.plan, entry.facts = compile_plan(captured.annotation, facts), None
    _enter(captured, entry, "eager")


def _overlapping(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf]) -> Any:
    """An argument shares memory with state, and a copy of it would hide a write: watched once, then eager."""
    if entry.overlapping is None:
        entry.overlapping = Entry((*entry.key, "overlaps state"))
    if entry.overlapping.phase in ("cold", "eager"):
        return _go_on(captured, entry.overlapping, values, leaves)
    bound = captured.call(values, leaves)
    return run_eagerly(captured, bound, "an argument shares memory with state that is written")


# ------------------------------------------------------------------------------------------------- keys without an end


def limit_plan(
    captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern | None = None
) -> tuple[LimitReached, CapturePlan]:
    """What asks for one recording more than there may be, and the plan that says so."""
    limit = miss_reason.difference(captured, entry, bound, tree, pattern)
    return limit, compile_plan(captured.annotation, captured.bare_facts(limit=limit))


def _limit_reached(
    captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern | None = None
) -> Any:  # fmt: skip
    captured.limited += 1
    reason = "as many recordings exist as there may be"
    is_asked_for = captured.annotation.fallback == "error" or current_config().refuse
    if is_asked_for or captured.limited.bit_count() == 1:  # to find out takes longer than many a body
        limit, plan = limit_plan(captured, entry, bound, tree, pattern)
        captured.report(plan)
        reason = f"{limit.num_recordings} recordings exist: {limit.difference}"
    return run_eagerly(captured, bound, reason, weight=AT_LIMIT)


def too_large_plan(captured: Captured, too_large: MemoryForecast) -> CapturePlan:
    """Says that a recording would take more memory than is allowed."""
    return compile_plan(captured.annotation, captured.bare_facts(too_large=too_large))


def _too_large(captured: Captured, bound: Call, too_large: MemoryForecast) -> Any:
    captured.report(too_large_plan(captured, too_large))
    reason = f"a recording would bring {too_large.device} to {too_large.nbytes} bytes of {too_large.limit}"
    return run_eagerly(captured, bound, reason, weight=AT_LIMIT)


def _no_new_key(captured: Captured, entry: Entry, bound: Call) -> Any:
    """Run eagerly and forget a key of which nothing is known: it will hardly come again."""
    if not entry.was_watched:
        captured.families.pop(entry.key[:-1], None)
    if captured.hopeless is None:
        return _given_up(captured, entry, bound)
    captured.report(captured.hopeless)
    return run_eagerly(captured, bound, "every call changes what its key is made of")


def _given_up(captured: Captured, entry: Entry, bound: Call) -> Any:
    """What was tried led to no replays: run eagerly, and say once what changes."""
    if not captured.budget.gave_up:
        why = "half of what may be tried led to no replay, and this key is new"
        return run_eagerly(captured, bound, why, weight=0.0)
    if not captured.is_told:
        given_up = key_difference.given_up(captured, bound)
        captured.report(compile_plan(captured.annotation, captured.bare_facts(given_up=given_up)))
    return run_eagerly(captured, bound, "recordings of it are not used again")


# -------------------------------------------------------------------------------------------- recordings of this entry


def _miss(captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern) -> Reply:
    """No recording fits: make one, within the limit."""
    if tree.lingering:  # nobody else has those gradients yet; an eager run may change that
        tree.let_go()
    if not entry.is_proven and not captured.budget.allows(entry.key, begun=not entry.nodes):
        return done(_given_up(captured, entry, bound))
    if (too_large := eviction.forecast(captured, entry, bound, tree)) is not None:
        return done(_too_large(captured, bound, too_large))
    if not eviction.makes_room(captured, entry, tree):
        return done(_limit_reached(captured, entry, bound, tree, pattern))
    if inputs.shares_with_state(bound, entry.plans()):
        return done(_overlapping(captured, entry, bound.values, bound.leaves))
    if _tells_apart(captured, entry, entry.places):
        return START_OVER
    if not (entry.nodes or entry.has_read_again or tree.backend.executes_recording_runs):
        return done(_read_once_more(captured, entry, bound, tree))
    if entry.nodes:
        captured.log.counters.misses += 1
        captured.log.add("miss", miss_reason.difference(captured, entry, bound, tree, pattern).difference)
    return done(_record(captured, entry, bound, tree, pattern))


def _read_once_more(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Watch another run: to capture one that reads what no run read before, where a capture executes nothing, would
    have the body's Python run twice in this call."""
    result = _observe(captured, entry, bound, tree)
    if entry.facts is not None and entry.facts.reads and not entry.has_read_again:
        entry.steadiness.note_stop(entry.facts.reads[-1], is_new=True)
        if entry.steadiness.is_lost:
            _lose_reads(captured, entry, tree)
    return result


def _record(captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern) -> Any:
    """The result of a call that is recorded, or was to be."""
    begin, before, kept = time.thread_time(), captured.log.counters.recordings, False
    costs = not entry.is_proven
    nbytes = tree.pool.reserved_bytes()
    try:
        reply = record.record(captured, entry, bound, tree, pattern)
        kept = captured.log.counters.recordings > before
    except BaseException as error:
        captured.log.counters.recorded_calls += _is_own(error)
        raise
    finally:
        ms = (time.thread_time() - begin) * 1e3
        if costs or not kept:
            captured.budget.spend("recordings" if kept else "drops", ms, key=entry.key)
    eviction.keep_within_limits(tree, entry, nbytes)
    refuted = reply.refuted if reply.verdict is Verdict.DONE else None
    if refuted is not None and _cuts_steps(captured, entry, tree, refuted.facts):
        captured.log.counters.recorded_calls += 1
        return reply.result
    if reply.verdict is Verdict.OBSERVE and reply.refuted is not None:
        entry.steadiness.note_stop(reply.refuted.facts.reads[-1], is_new=True)
        if entry.steadiness.is_lost:
            _lose_reads(captured, entry, tree)
            return run_eagerly(captured, bound, "what the host reads does not come again")
        return _observe(captured, entry, bound, tree)
    if reply.verdict is Verdict.OBSERVE:
        _enter(captured, entry, planning.forget_stored(entry))
        return _observe(captured, entry, bound, tree)
    if not reply.body_first:
        _settle(captured, entry, reply)
    if reply.verdict is not Verdict.EAGER:
        captured.log.counters.recorded_calls += 1
        return reply.result
    result = run_eagerly(captured, bound, reply.reason)
    if reply.body_first:
        _settle(captured, entry, reply)
    return result


def _settle(captured: Captured, entry: Entry, reply: Reply) -> None:
    """After a recording run: the plan is kept as it is now, or replaced."""
    if reply.refuted is not None:
        _enter(captured, entry, planning.replace(captured, entry, reply.refuted))
        if reply.refuted.is_branch and entry.backend is not None and entry.steadiness.is_lost:
            _lose_reads(captured, entry, tree_for(entry.backend))
    elif reply.verdict is Verdict.DONE and entry.plan_is_new:
        planning.save(captured, entry)


def _state_moved(captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree) -> Reply:
    """The recording that follows found its Python state elsewhere, or changed."""
    if _finds_inputs(captured, entry, node.guard.places):
        return START_OVER
    reply = rebind.state_moved(captured, entry, node, values, leaves, tree)
    if captured.sizes is not None:
        captured.sizes.clear()
    if reply.verdict is Verdict.REPLAY and node.reads:
        return GO_ON
    if reply.verdict is Verdict.REPLAY:
        return done(_replay(captured, entry, node, values, leaves, tree, reply.learned))
    return _after_move(captured, entry, node, values, leaves, tree, reply)


def _after_move(
    captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree, reply: Reply
) -> Reply:  # fmt: skip
    """A recording is no more what its state asks for."""
    if reply.verdict is Verdict.OBSERVE:
        if not _tells_apart(captured, entry, node.guard.places):
            changed = key_difference.changed_state(captured, node, leaves)
            captured.log.add("drop", f"{changed or 'what the recording relies on'} was replaced")
            captured.budget.spend("drops", 0.0, changed=changed)
            _forget(captured, entry, tree)
            for one in (captured.receiver, *values, *captured.optimizers.modules()):
                if isinstance(one, torch.nn.Module):
                    forget_module_structure(one)
        return START_OVER
    if reply.verdict is Verdict.EAGER:
        entry.plan, entry.may_change = reply.plan, False
        _enter(captured, entry, "eager")
        return GO_ON
    return reply


def _verifies(captured: Captured) -> bool:
    return captured.annotation.verify != "off" or current_config().verify != "off"


def _replay(
    captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree,
    learned: Sequence[Move] = (),
) -> Any:  # fmt: skip
    """Run a recording that fits, and compare it with eager where that is due, or where it ``learned`` new addresses."""
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    if not learned and not (_verifies(captured) and verify.is_due(captured, node)):
        return replay(captured, node, tree, values, leaves, body_run.current())
    bound = captured.call(values, leaves, entry)
    found = verify.verified(captured, entry, node, tree, bound)
    if learned:
        against = f"{found.differs} differs from eager at the new address" if found.is_wrong else None
        against = found.undecided or against
        if against is not None:
            rebind.distrust(captured, entry, node, learned, against)
    elif found.differs is not None:
        _differs(captured, entry, tree, found.differs, is_wrong=found.is_wrong)
    return found.result if found.has_result else verify.run_body(captured, bound)


# ------------------------------------------------------------------------------------- branches by what the host reads


def _follow(captured: Captured, entry: Entry, node: Node, values: Values, leaves: list[Leaf], tree: Tree) -> Reply:
    """Run recordings segment by segment. Where none goes on after what was read, nothing has happened."""
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    siblings = tree.current.children[node.key]
    if _verifies(captured) and any(verify.is_due(captured, one) for one in siblings if one.reads):
        bound = captured.call(values, leaves, entry)
        found = verify.verified(captured, entry, node, tree, bound)
        if found.differs is not None:
            _differs(captured, entry, tree, found.differs, is_wrong=found.is_wrong)
        if found.stopped is None:
            return done(found.result if found.has_result else verify.run_body(captured, bound))
        stopped = found.stopped
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
        return done(stopped.result)
    if stopped.ran:
        islands.answer(body_run.current(), stopped.ran)
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
        reply = _lose_reads(captured, entry, tree)
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
    for other in _siblings_after(reads, node, tree) if again else ():
        state = other.check(bound.leaves)
        if state and state != OVERLAPS:
            return _state_moved(captured, entry, other, bound.values, bound.leaves, tree)
        given = bound.values, bound.leaves, body_run.current()
        found = None if state else branches.replay(captured, other, tree, *given)
        if found is not None and found.node is not None:
            return done(found.result)
    captured.log.counters.misses += 1
    captured.log.add("miss", f"the host read {', '.join(reads)[-80:]}, for the first time")
    known = [one for told, one in entry.known_branches() if told[: len(reads)] == reads]
    entry.steadiness.note_stop(reads[-1], is_new=not known)
    if entry.steadiness.is_lost:
        return _lose_reads(captured, entry, tree)
    if not captured.budget.allows(entry.key):
        return done(_given_up(captured, entry, bound))
    if any(one.plan is not None and one.plan.outcome == "eager" for one in known):
        return done(run_eagerly(captured, bound, "what the body does after this value cannot be recorded"))
    if known:
        return done(_record(captured, entry, bound, tree, node.key[1]))
    if len(entry.branches) >= MOST_BRANCHES:
        return done(run_eagerly(captured, bound, "there are as many branches as there may be"))
    return done(_observe(captured, entry, bound, tree))


def _siblings_after(reads: branches.Reads, node: Node, tree: Tree) -> list[Node]:
    """Recordings that cannot go on from this one, and may have been made for these reads."""
    every = tuple(tree.current.children.get(node.key, ()))
    apart = [one for one in every if one is not node and one.number not in node.joined]
    return [one for one in apart if one.reads[: len(reads)] == reads and branches.fits(one, tree)]


def _lose_reads(captured: Captured, entry: Entry, tree: Tree) -> Reply:
    """What the host reads does not come again: recordings of this body are not worth their while."""
    known, (stops, replays) = entry.known_branches(), (entry.steadiness.stops, entry.steadiness.replays)
    facts = next((one.facts for _, one in known), None)
    assert facts is not None
    _forget(captured, entry, tree)
    why = f"what it reads is another value in call after call: {len(known)} branches led to {replays} replays"
    captured.log.add("drop", f"{why} ({stops} stops)")
    entry.plan, entry.may_change = compile_plan(captured.annotation, evolve(facts, unsteady_reads=why)), False
    _enter(captured, entry, "eager")
    return GO_ON


def _differs(captured: Captured, entry: Entry, tree: Tree, path: str, *, is_wrong: bool) -> None:
    """A recording that differs is forgotten; of a body that differs from itself it is said."""
    facts = captured.bare_facts(verification=Verification(path=path, deterministic=is_wrong))
    plan = compile_plan(captured.annotation, facts)
    if not is_wrong:
        captured.note_findings(plan)
        return
    _forget(captured, entry, tree)
    entry.plan, entry.may_change = plan, False
    _enter(captured, entry, "eager")


def _tells_apart(captured: Captured, entry: Entry, known: Places) -> bool:
    """What the body can have read has other values than those that are known: they are part of the key from now on,
    and all that was recorded is dropped, as no call has one of the keys so far any more."""
    if _finds_inputs(captured, entry, known):
        return True
    told = locked(known.tell_apart, captured.named) if known.all else []  # else another thread's stand-ins may be seen
    if not told:
        return False
    captured.log.add("drop", f"{told[0]} is another value, and tells calls apart from now on")
    captured.budget.spend("drops", 0.0, changed=told[0])
    if entry.backend is not None:
        _forget(captured, entry, tree_for(entry.backend))
    captured.retire()
    return True


def _finds_inputs(captured: Captured, entry: Entry, known: Places) -> bool:
    """Objects that are others in call after call are inputs from now on, and all that was recorded is dropped."""
    if captured.is_backward or captured.sizes is not None:
        return False
    counters, replacements = captured.log.counters, captured.replacements
    number = counters.body_runs + counters.replays
    replacements.note(known.objects, number)
    if not entry.was_watched:
        replacements.note_new_key(number)
    found = replacements.inputs()
    if not found:
        return False
    captured.take_inputs(found)
    paths = ", ".join([one.path for one in found])
    captured.log.add("drop", f"{paths}: another object in each call, an input from now on")
    if entry.backend is not None:
        _forget(captured, entry, tree_for(entry.backend))
    captured.retire()
    return True


def _forget(captured: Captured, entry: Entry, tree: Tree) -> None:
    """Drop all recordings of an entry and start it over."""
    for node in list(entry.nodes):
        tree.forget(node)
    entry.nodes.clear()
    if entry.region is not None:
        entry.region.retire()
        entry.without_region()
    captured.clear_fast_paths()
    entry.plan, entry.facts = None, None
    entry.branches.clear()
    _enter(captured, entry, "cold")


# ------------------------------------------------------------------------------------------- calls that are padded


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
    result = _padded(captured, values, now, size)
    return _dispatch(captured, values, now) if result is MISS else result


def _padded(captured: Captured, values: Values, now: Here, size: Size) -> Any:
    """Replay a padded call that was compared with the body at this size, or compare it now. Nothing of a padded run is
    the call but such a replay: watched and recorded, it is undone. ``MISS``: the call keeps its own size."""
    padded = PaddedCall.of(captured, values, size)
    outer, inner = body_run.current(), BodyRun()
    if outer is None:
        return MISS
    for _ in range(RETRIES + 1):
        try:
            found = body_run.during(inner, _padded_node, (captured, padded, now))
        except Exception as error:
            if inner.error is not error:
                raise
            found = padded.refusal("raises", detail=f"{type(error).__name__}: {error}")
        if found is not None:
            break
    if isinstance(found, Tree):
        return _warm_up(captured, padded.call, found)
    if not isinstance(found, PaddedNode):
        if found is not None:
            _not_padded(captured, found)  # raises as often as it is asked where the annotation says so
        size.let_rest()
        return MISS
    if found.node.reads:
        return _read_padded(captured, padded, found)
    proof, count = found.node.proofs.get(padded.proof), size.counts.setdefault(padded.proof, Count())
    always = "always" in (captured.annotation.verify, current_config().verify)
    if proof is None or count.is_due or always or found.learned:
        return _compare(captured, padded, found, count)
    count.calls += 1
    result = _replay_padded(captured, padded, found, proof, outer)
    if captured.annotation.verify != "always":
        _add_way(captured, padded, found, proof, count, now)
    return result


def _padded_node(captured: Captured, padded: PaddedCall, now: Here) -> PaddedNode | BucketRefusal | Tree | None:
    """The recording that a padded call is a replay of, made where there is none; or why there is none. A tree: its step
    warms up. None: look again."""
    entry, leaves = _entry_of(captured, padded.values, now.ambient)
    padded.leaves = leaves
    backend = engine_of(captured, entry, leaves)
    if backend is None or backend.in_capture() or entry.phase == "eager":
        return NOT_RECORDED
    if entry.region is not None:
        return padded.refusal("gradients")
    tree = tree_for(backend)
    tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    if tree.lingering:
        tree.let_go()
    if tree.warm:
        return tree
    node = _fitting(captured, entry, tree, tree.pattern(leaves)) if entry.phase == "ready" else None
    learned: Sequence[Move] = ()
    if node is None:
        if not captured.budget.allows(entry.key) or not eviction.makes_room(captured, entry, tree):
            return NOT_RECORDED
        call, known = captured.call(padded.values, leaves), tuple(entry.nodes)
        is_made = lambda: _made_since(known, entry, tree) is not None  # noqa: E731
        bring_to_replay(captured, entry, call, tree, is_made, with_gradients=False)
        node = _made_since(known, entry, tree)
        if node is None:
            return padded.refusal("gradients") if entry.in_use().region is not None else NOT_RECORDED
    elif (state := node.check(leaves)) == OVERLAPS:
        return NOT_RECORDED
    elif state:
        reply = rebind.state_moved(captured, entry, node, padded.values, leaves, tree)
        captured.clear_fast_paths()
        if reply.verdict is not Verdict.REPLAY:
            _after_move(captured, entry, node, padded.values, leaves, tree, reply)
            return None
        learned = reply.learned
    if current_config().poison:
        tree.pool.poison([block for block, _ in tree.live_blocks()])
    return padded.fits(entry, node, tree, learned)


def _made_since(known: Sequence[Node], entry: Entry, tree: Tree) -> Node | None:
    """A recording of this thread's that was not among these: other threads record the same entry in trees of theirs."""
    return next((node for node in tuple(entry.nodes) if node.tree is tree and node not in known), None)


def _compare(captured: Captured, padded: PaddedCall, found: PaddedNode, count: Count) -> Any:
    """The body's own result. A padded replay runs before it, and is taken back."""
    proved = bucket_proof.compared(captured, padded, found)
    entry, node = found.entry, found.node
    if proved.refusal is not None and found.learned:
        rebind.distrust(captured, entry, node, found.learned, f"{proved.refusal.path} differs at the new address")
    elif proved.refusal is not None:
        node.proofs[padded.proof] = proved.refusal
        captured.clear_fast_paths()
        try:
            _not_padded(captured, proved.refusal)
        except UncapturableError:
            proved.take_back()
            raise
        padded.size.let_rest()
    elif proved.is_silent:
        padded.size.let_rest()
    elif proved.trim is not None:
        node.proofs[padded.proof] = proved.trim
        padded.size.is_proven()
        count.compared()
    return proved.result


def _read_padded(captured: Captured, padded: PaddedCall, found: PaddedNode) -> Any:
    """Where the body reads values on the host, only the replay tells which recording gives the result. The body changes
    nothing, so it may run after that."""
    entry, size, inner = found.entry, padded.size, BodyRun()
    try:
        where = captured, found.node, found.tree, padded.values, padded.leaves, inner
        followed = branches.replay(*where, resumes=False)
    except Exception as error:
        if inner.error is not error:
            raise
        return run_eagerly(captured, padded.call, "an operator raised")
    if followed.node is None:
        if followed.moved is not None or len(entry.branches) >= MOST_BRANCHES:
            size.let_rest()
            return MISS
        call, known = captured.call(padded.values, padded.leaves, entry), tuple(entry.nodes)
        parts = captured, entry, call, found.tree, lambda: _made_since(known, entry, found.tree) is not None
        body_run.during(BodyRun(), bring_to_replay, parts)
        return run_eagerly(captured, padded.call, "the host read a value for the first time")
    proof, count = followed.node.proofs.get(padded.proof), size.counts.setdefault(padded.proof, Count())
    if isinstance(proof, BucketRefusal):
        size.let_rest()
        return run_eagerly(captured, padded.call, "padding shows after what the host read")
    if proof is None or count.is_due or _verifies(captured):
        return _compare(captured, padded, evolve(found, node=followed.node, given=(followed.result,)), count)
    entry.steadiness.replays += 1
    count.calls += 1
    return proof(followed.result)


def _replay_padded(captured: Captured, padded: PaddedCall, found: PaddedNode, trim: Trim, outer: BodyRun) -> Any:
    """The call."""
    outer.replayed, inner = True, BodyRun()
    try:
        where = captured, found.node, found.tree, padded.values, padded.leaves, inner
        result = trim(replay(*where, resumes=not found.is_pure))
    except Exception as error:
        outer.error = error if inner.error is error else None
        outer.replayed = inner.replayed
        if outer.error is None or not found.is_pure:
            raise
        outer.error = None  # eager's own error tells of the sizes that the caller gave
        return run_eagerly(captured, padded.call, "an operator raised")
    outer.replay(result)
    return result


def _add_way(
    captured: Captured, padded: PaddedCall, found: PaddedNode, trim: Trim, count: Count, now: Here
) -> None:  # fmt: skip
    """The next call like this one may take the fast way, if every recording that it may come to was compared."""
    size, entry = padded.size, found.entry
    if any(node.proofs.get(padded.proof) is None for node in entry.nodes):
        return
    paths = [path for path, _ in padded.call.paths()]
    shortcuts = Shortcuts()
    way = way_of(entry, padded.tensors, padded.call.leaves, paths, found.node, count, shortcuts, is_pure=found.is_pure)
    if way is None:
        return
    shortcuts.add(captured, padded.values, padded.leaves, entry, now, _GoesOnApart(captured, trim))
    size.ways[:] = [one for one in size.ways if one.entry is not entry or one.nodes == entry.nodes][-_MOST_WAYS:]
    size.ways.insert(0, way)


def _not_padded(captured: Captured, refusal: BucketRefusal) -> None:
    """Say once why calls keep their own sizes."""
    if refusal is not NOT_RECORDED:
        plan = compile_plan(captured.annotation, captured.bare_facts(bucket=refusal))
        captured.report(plan, "keeps its own size")


# ------------------------------------------------------------------------- numbers that are others in each call


def _lift(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """A new key that differs from a known one in numbers alone: have one recording serve both. The call's result, or
    ``MISS`` where that is not so."""
    plain = captured.sizes is None and not captured.is_backward and entry.region is None
    begins = tree.backend.lifts_numbers and not (tree.path or tree.warm)
    if not plain or not begins or not any(type(value) is float for value in bound.values):
        return MISS
    found = numbers.twin_of(entry, captured.entries(), captured.lifted, bound.values)
    if found is None:
        return MISS
    if not _lifting.acquire(blocking=False):  # another thread compares entries, and takes some away
        return MISS
    run = BodyRun()
    try:
        lifted = body_run.during(run, _lifted, (captured, entry, bound, *found, tree))
    except Exception as error:
        if run.error is not error:
            raise
        lifted = None  # the body's own, which the call comes to
    finally:
        _lifting.release()
    if lifted is None:
        captured.lifts_left = max(captured.lifts_left - 1, 0)
        return MISS
    for one in tuple(captured.lifted):
        if one.entry is found[0]:  # it serves some values of fewer numbers
            _lift_no_more(captured, one)
    alive = [one for one in captured.lifted if one.node.recording is not None]
    captured.lifted[:] = [*alive[-_MOST_LIFTED:], lifted]
    captured.log.add("plan", "one recording serves all values of its numbers")
    result = _compare_numbers(captured, lifted, bound, bound.leaves)
    lifted.count = Count()  # that was the number which was recorded: the next one says more
    return result


def _lifted(
    captured: Captured, entry: Entry, bound: Call, twin: Entry, positions: tuple[int, ...], tree: Tree
) -> numbers.Lifted | None:  # fmt: skip
    """Record both calls, without a trace, and compare what was recorded."""
    sequence = numbers.noted_run(captured, bound, positions)
    if sequence is None:
        captured.lifts_left = 0  # with other numbers the code is the same
        return None
    now, then = [bound.values[at] for at in positions], [numbers.number_of(twin.key[1][at]) for at in positions]
    node, other = (
        _node_at_root(captured, one, numbers.with_numbers(bound.values, positions, own), bound.leaves, tree)
        for one, own in ((entry, now), (twin, then))
    )
    if node is None or other is None or entry.facts is None or entry.facts.sequence != sequence:
        return None
    assert other.recording is not None
    assert node.recording is not None
    found = tree.backend.lift(other.recording, node.recording, list(zip(then, now, strict=True)))
    if found is None:
        return None
    for one in (twin, entry):  # calls come to the recording by ``Lifted`` alone, which puts their numbers there
        family = captured.families.pop(one.key[:-1], None)
        for below in list(family.entries.values()) if family is not None else ():
            if below is not entry:
                below.retire()
    captured.clear_fast_paths()
    return numbers.Lifted(entry, entry.key, node, tree, found, positions, bound.values, Shortcuts())


def _node_at_root(captured: Captured, entry: Entry, values: Values, leaves: list[Leaf], tree: Tree) -> Node | None:
    """A recording that begins a step, made without a trace where there is none."""

    def found() -> Node | None:
        return next((node for node in entry.nodes if node.parent is tree.root and not node.reads), None)

    if found() is None:
        call = captured.call(values, leaves)
        bring_to_replay(captured, entry, call, tree, lambda: found() is not None, with_gradients=False)
        tree.end_path("numbers")
    return found()


def _with_its_numbers(captured: Captured, values: Values, now: Here) -> Any:
    """The result of a call by a recording that serves all values of its numbers; ``MISS`` where none does."""
    for one in tuple(captured.lifted):
        found = one.taken(values)
        if found is None:
            continue
        standing, leaves = one.standing(values), Leaves()
        key = (now.ambient, captured.arguments(standing, leaves), *(captured.rest(standing) if one.key[2:-1] else ()))
        family = one.entry.family
        assert family is not None
        if key != one.key[:-1] or inputs.alias_pattern(leaves, family.spans) != one.key[-1]:
            continue
        if family.takes_any_form or family.form(leaves) == one.entry.form:
            return _by_number(captured, one, found, values, leaves, now)
    return MISS


def _by_number(
    captured: Captured, lifted: numbers.Lifted, found: Sequence[float], values: Values, leaves: list[Leaf], now: Here
) -> Any:  # fmt: skip
    entry, tree, standing = lifted.entry, lifted.tree, lifted.standing(values)
    if tree_for(tree.backend) is not tree:  # that of a thread which is gone, whose number this one has
        _lift_no_more(captured, lifted)
        return MISS
    tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    if tree.lingering:
        tree.let_go()
    if tree.warm or tree.backend.in_capture():
        return MISS
    node = _fitting(captured, entry, tree, tree.pattern(leaves)) if lifted.node in entry.nodes else None
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
    if lifted.count.is_due or learned or _verifies(captured):
        return _compare_numbers(captured, lifted, bound, leaves)
    run = body_run.current()
    result = lifted.run(found, lambda: replay(captured, node, tree, values, leaves, run))
    lifted.count.calls += 1
    lifted.add_path(captured, standing, leaves, now, _GoesOnApart(captured, own_values=lifted.values_now))
    return result


def _compare_numbers(captured: Captured, lifted: numbers.Lifted, bound: Call, leaves: list[Leaf]) -> Any:
    """The result of a call whose replay is compared with its body."""
    found = lifted.taken(bound.values)
    assert found is not None
    verified = numbers.compared(captured, lifted, bound, found, leaves)
    if verified.is_wrong:
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
        lifted.tree.forget(node)
    lifted.entry.retire()


@frozen(eq=False)
class _GoesOnApart:
    """What the fast way goes on with in a call that is replayed as another one: padded, or with another number."""

    captured: Captured
    trim: Trim | None = None
    own_values: Callable[[], Values | None] = lambda: None
    """Gives the caller's own values, where the body can go on with them."""

    @property
    def attach(self) -> Callable[..., Any] | None:
        """Makes what C replayed the call's result."""
        trim = self.trim
        return None if trim is None else lambda result, leaves, node: trim(result)

    def replay(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf]) -> Any:
        """The same in Python."""
        own = self.own_values()
        result = replay(self.captured, node, tree, values if own is None else own, leaves, None)
        return result if self.trim is None else self.trim(result)

    def tell(self, errors: list[BaseException]) -> None:
        """A replay came to its end, and this came in between."""
        tell(self.captured, errors)

    def raised(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf], error: BaseException) -> Any:
        """A replay ended in an error. The caller's own sizes are not known here."""
        own = self.own_values()
        commit = Commit(self.captured, node, tree, values if own is None else own, leaves)
        if own is None or not commit.was_stopped():
            raise error
        return commit.resumed(error, None)

    def ready(self, entry: Entry, values: Values, leaves: list[Leaf]) -> Any:
        """The recording relies on state that is another now, so it says nothing of what the body does."""
        return MISS


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
        """Makes what C replayed the call's result."""
        return None if self.entry.region is None else self.entry.region.attach

    def replay(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf]) -> Any:
        """Run a recording that was found to fit."""
        if node.reads:
            return self._follow(node, tree, values, leaves)
        return finish(replay(self.captured, node, tree, values, leaves, None), leaves)

    def _follow(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf]) -> Any:
        """The same where the host reads values. What begins with a recording that fits may end in one that has to be
        verified first."""
        captured, entry, run_now = self.captured, self.entry, BodyRun()
        if tree.lingering or captured.annotation.verify != "off":
            return self.ready(entry, values, leaves)
        measured = entry.payoff if _is_measured(captured, entry) else None
        if measured is not None and measured.wants_body:
            return self.ready(entry, values, leaves)
        begun = 0.0 if measured is None else payoff.clock()
        try:
            stopped = branches.replay(captured, node, tree, values, leaves, run_now)
        except Exception as error:
            if run_now.replayed or run_now.error is error or is_interrupt(error):
                raise
            return self.ready(entry, values, leaves)  # nothing has happened yet
        if stopped.node is None:
            begin = lambda: _came_to(captured, entry, node, stopped, values, leaves, tree)  # noqa: E731
            return _guarded(captured, values, _ready, entry, leaves, begin)
        entry.steadiness.replays += 1
        if measured is not None:
            measured.note_replay(payoff.clock() - begun)
        return finish(stopped.result, leaves)

    def tell(self, errors: list[BaseException]) -> None:
        """A replay came to its end, and this came in between."""
        tell(self.captured, errors)

    def raised(self, node: Node, tree: Tree, values: Values, leaves: list[Leaf], error: BaseException) -> Any:
        """A replay ended in an error."""
        commit = Commit(self.captured, node, tree, values, leaves)
        if not commit.was_stopped():
            raise error
        return commit.resumed(error, None)

    def ready(self, entry: Entry, values: Values, leaves: list[Leaf]) -> Any:
        """The recording that follows relies on state that is another now. Some of that is a mode, such as a block that
        keeps parametrized weights."""
        return MISS if here() is None else _guarded(self.captured, values, _ready, entry, leaves)


# ---------------------------------------------------------------------- the same steps without a trace, for the warm-up

_ONE_RUN = "its collectives need the other ranks, so each warm-up runs the body once: warm up again, or call it"


def bring_to_replay(
    captured: Captured, entry: Entry, call: Call, tree: Tree, is_recorded: Callable[[], bool], *,
    with_gradients: bool = True,
) -> Outcome:  # fmt: skip
    """Watch and record a call, and undo both runs."""
    for _ in range(2 * RETRIES + 3):  # each run either brings the entry on or is one that differs from the last
        entry = entry.in_use()
        if entry.region is not None and not with_gradients:
            return Outcome("skipped", "its results need gradients")
        call = captured.call(call.values, call.leaves, entry)
        phase = load(captured, entry, call.leaves) if entry.phase == "cold" else entry.phase
        if phase == "cold":
            facts = observe_undone(captured, entry, call)
            if facts.collectives:
                return Outcome("skipped", _ONE_RUN)
            if facts.islands and not with_gradients:
                return Outcome("skipped", "an island runs once a call")
        elif phase == "eager":
            return stays_eager(captured, entry)
        else:
            too_large = eviction.forecast(captured, entry, call, tree)
            if too_large is not None:
                plan = too_large_plan(captured, too_large)
                captured.report(plan)
                return because(plan)
            record_undone(captured, entry, call, tree)
            together = entry.plan is not None and entry.plan.collectives
            if together and not tree.backend.executes_recording_runs:  # it was captured, and nothing has run
                run_undone(captured, call)
            if is_recorded():
                return Outcome("recorded")
            if together:
                return Outcome("skipped", _ONE_RUN)
    eager = entry.phase == "eager"
    return stays_eager(captured, entry) if eager else Outcome("skipped", "every run differs from the last")


def stays_eager(captured: Captured, entry: Entry) -> Outcome:
    """The plan says eager: said if it was not said yet, raised where the annotation asks for it."""
    if entry.plan is None:
        return Outcome("skipped", "this key cannot be recorded")
    captured.report(entry.plan)
    return because(entry.plan)


def because(plan: CapturePlan) -> Outcome:
    """What a plan gives as the reason."""
    findings = plan.findings_at_least(Severity.EAGER)
    return Outcome("skipped", findings[0].what, findings[0].code) if findings else Outcome("skipped", "it runs eagerly")


def observe_undone(captured: Captured, entry: Entry, bound: Call) -> Facts:
    """Watch one eager run, plan by what it showed, and undo it."""
    observed = planning.observe_undone(captured, entry, bound)
    _plan(captured, entry, observed)
    return observed.facts


def record_undone(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> None:
    """Record a call without a result, and undo the run."""
    entry.warmups_left = 0
    _enter(captured, entry, "ready")
    nbytes = tree.pool.reserved_bytes()
    reply = record.record(captured, entry, bound, tree, tree.pattern(bound.leaves), undo=True)
    eviction.keep_within_limits(tree, entry, nbytes)
    if reply.verdict is Verdict.OBSERVE:
        _enter(captured, entry, planning.forget_stored(entry))
    else:
        _settle(captured, entry, reply)


def run_undone(captured: Captured, bound: Call) -> None:
    """Run the body and undo that."""
    watched, _ = planning.watch(captured, bound, undo=True, trial=True)
    run.undo(watched)
