"""Eager calls: the one place that runs a body eagerly, on the caller's own tensors, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from capture.core.config import current as current_config
from capture.core.errors import UncapturableError
from capture.core.interrupts import is_interrupt
from capture.key.modes import here, inlined
from capture.key.pytree import result_leaves
from capture.key.signature import Leaf
from capture.native import MOST_PATHS
from capture.observe import islands, run
from capture.runtime import fault, payoff
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.checked_replay import verifies
from capture.runtime.entry import Entry
from capture.runtime.payoff import Trial
from capture.runtime.phases import give_up_slow
from capture.runtime.training_region import finish
from capture.state import body_run
from capture.state.call import Call
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree

_MUCH = 256 << 20  # bytes


def is_measured(captured: Captured, entry: Entry) -> bool:
    """Whether replays of this entry are to be compared with its body, which a call may run in its place. A device of
    its own works on while the host goes on, so there replays are measured where the host reads values, or where the
    host takes long for them. Not with much memory: the body takes as much again."""
    if not entry.payoff.is_open or captured.is_backward or entry.backend is None:
        return False
    settings = current_config()
    if not settings.drop_slow or settings.poison or verifies(captured):
        return False
    if entry.plan is not None and entry.plan.collectives:
        return False
    if not entry.backend.has_own_memory or entry.has_reads:
        return True
    if entry.region is not None or entry.plan is None:
        return False
    pool = tree_for(entry.backend, captured.pool.number).pool
    return entry.payoff.is_in_doubt(entry.plan.num_ops) and pool.reserved_bytes() <= _MUCH


def measure_body(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
    """Run the body in the place of a replay. The rest of the step runs eagerly, too: recordings of others that follow
    on this one's would be made again."""
    took: list[float] = []
    why, clock = "to be compared with how long replays take", payoff.clock_of(entry)
    result = run_eagerly(captured, bound, why, kind="measured", took=took, clock=clock)
    note_warm(captured, result, bound, tree)
    if entry.region is not None:
        entry.region.time_backward(result, bound.leaves, is_replay=False)
    entry.payoff.note_body(took[0])
    _decide(captured, entry, tree)
    if captured.trial is None and entry.payoff.wants_body:
        _begin_trial(captured, entry, bound.values)
    return result


def _decide(captured: Captured, entry: Entry, tree: Tree) -> None:
    """Once it is known whether replays pay, drop a recording that does not."""
    if entry.payoff.is_open:
        return
    if entry.region is not None:
        entry.region.stop_timing()
    if entry.payoff.loss:
        give_up_slow(captured, entry, tree)


def body_in_place(captured: Captured, values: Values, entry: Entry, leaves: list[Leaf]) -> Any:
    """Run the body instead of a replay that C found to fit."""
    assert entry.backend is not None
    run_now = body_run.current()
    assert run_now is not None
    run_now.entry, run_now.leaves = entry, leaves
    tree = tree_for(entry.backend, captured.pool.number)
    tree.begin_call(captured, captured.annotation.max_recordings, entry.number)
    if tree.lingering:
        tree.let_go()
    return finish(measure_body(captured, entry, captured.call(values, leaves), tree), leaves)


def run_on_trial(captured: Captured, trial: Trial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run and time the body in place of a replay, with nothing before it: the steps of an ordinary call make a small
    body up to twice as slow as in a loop of its own. Nearly everything is counted when the trial ends, as counting
    would slow the next call down."""
    counters, function = captured.log.counters, captured.body()
    clock = trial.clock
    begin = clock()
    try:
        result = function(*args, **kwargs)
    finally:
        counters.body_runs += 1
        counters.measured_calls += 1
        seconds = clock() - begin
    region = trial.entry.region
    if region is None and trial.goes_on(args, kwargs, seconds):
        return result
    try:
        if region is not None and trial.goes_on(args, kwargs, seconds):
            region.time_backward(result, payoff.tensors_of(args, kwargs), is_replay=False)
        else:
            _end_trial(captured, trial)
    except UncapturableError:  # as the annotation asks
        raise
    except Exception as error:
        captured.trial = None
        if is_interrupt(error) or current_config().strict:
            raise
        fault.log(captured, error)
    return result


def _begin_trial(captured: Captured, entry: Entry, values: Values) -> None:
    """The next calls go straight to the body: fast paths are out of the way. Not where other recordings are in use,
    nor where others begin with results of this one."""
    entries = (entry, *(entry.region.entries() if entry.region is not None else ()))
    is_alone = all(
        entry_of_function in entries or not entry_of_function.nodes for entry_of_function in captured.entries()
    )
    others = [lifted for lifted in captured.lifted if lifted.entry is not entry]
    if captured.plain_binder is not None:  # the calls have arrays where these values have tensors
        return
    if not is_alone or captured.is_chained or captured.sizes is not None or others:
        return
    trial = Trial.of(entry, values, entry.payoff.wanted, any_number=bool(captured.lifted))
    if run.active_watch() is None and trial is not None:
        captured.trial = trial
        captured.fast_paths.pause()


def _end_trial(captured: Captured, trial: Trial) -> None:
    """Keep what was measured."""
    captured.trial, entry, now = None, trial.entry, here()
    captured.fast_paths.resume()
    if now is None or now.ambient != entry.key[0] or not entry.nodes or not is_measured(captured, entry):
        return
    captured.log.add("measure", f"{len(trial.bodies)} calls, to be compared with how long replays take")
    captured.log.eager_ms.extend([seconds * 1e3 for seconds in trial.bodies])
    captured.budget.ran_eagerly(min(trial.bodies, default=0.0) * 1e3, weight=0.0)
    for seconds in trial.bodies:
        entry.payoff.note_body(seconds)
    _decide(captured, entry, tree_for(entry.backend, captured.pool.number))


def run_eagerly(
    captured: Captured,
    bound: Call,
    reason: str = "",
    *,
    kind: Literal["eager", "warm-up", "measured", "inline"] = "eager",
    weight: float = 1.0,
    took: list[float] | None = None,
    clock: Callable[[], float] | None = None,
) -> Any:
    """The one place where a bound call runs its body eagerly, on the caller's own tensors. ``warm-up``: calls like this
    are recorded soon; ``measured``: it stands for a replay, to learn which of the two is faster; ``inline``: somebody
    else captures what it does, and neither counts nor watches are ours.
    ``weight``: as for ``Budget.ran_eagerly``. ``took``: gets the seconds that the body took, by
    this ``clock``."""
    log = captured.log
    if kind == "inline":
        log.counters.inline_calls += 1
        return bound.run_plainly()
    log.counters.body_runs += 1
    if kind == "warm-up":
        log.counters.warm_up_calls += 1
        with log.timed("warm-up"):
            return inlined(bound.run_plainly)
    log.add("measure" if kind == "measured" else "eager", reason)
    run_now = body_run.current()
    clock = clock or payoff.clock
    begin = clock()
    if kind == "eager" and weight and run_now is not None and _is_found_by_paths(captured):
        captured.budget.looked_in_vain((begin - run_now.begun) * 1e3)
    try:
        if run_now is not None and islands.has_answers(run_now):  # some may be steps of optimizers
            with captured.optimizers.steps_apart(run.run_island):
                return bound.run_plainly()
        return bound.run_plainly()
    finally:
        if kind == "measured":
            log.counters.measured_calls += 1
        else:
            log.counters.eager_calls += 1
        seconds = clock() - begin
        if took is not None:
            took.append(seconds)
        log.eager_ms.append(seconds * 1e3)
        captured.budget.ran_eagerly(seconds * 1e3, weight=0.0 if kind == "measured" else weight)


def _is_found_by_paths(captured: Captured) -> bool:
    """Whether all recordings may have fast paths, which are tried before anything else: others need a look at each
    call."""
    return captured.sizes is None and not captured.lifted and captured.annotation.max_recordings <= MOST_PATHS


def warm_up(captured: Captured, bound: Call, tree: Tree, entry: Entry | None = None) -> Any:
    """Asked for by ``warmup=``, or because a step that warms up is still open. ``entry``: what is to be measured is
    measured then."""
    if entry is not None and is_measured(captured, entry) and entry.payoff.wants_body:
        return measure_body(captured, entry, bound, tree)
    tree.note_chain(captured, bound.leaves)
    result = run_eagerly(captured, bound, kind="warm-up")
    note_warm(captured, result, bound, tree)
    return result


def note_warm(captured: Captured, result: Any, bound: Call, tree: Tree) -> None:
    tensors = [leaf for _, leaf in result_leaves(result) if issubclass(type(leaf), torch.Tensor)]
    tree.note_warm(captured, [tensor for tensor in tensors if all(tensor is not leaf for leaf in bound.leaves)])
