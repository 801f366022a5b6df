"""Fault boundary: an error of this library ends as an eager call and one finding; errors of the body are raised
unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capture.core.config import current as current_config
from capture.core.errors import CaptureBug, CaptureError, UncapturableError
from capture.core.interrupts import is_interrupt, let_go_of_frames, let_through
from capture.observe import islands
from capture.observe.capture_lock import BusyError
from capture.rules.compile_plan import compile_plan
from capture.runtime import fault, payoff, record_failure
from capture.runtime.buckets import Values
from capture.runtime.captured import Captured
from capture.runtime.eager_call import run_eagerly
from capture.runtime.entry import RETRIES, Entry
from capture.runtime.phases import enter, forget
from capture.runtime.training_region import finish
from capture.state import body_run
from capture.state.body_run import BodyRun
from capture.tree.thread_trees import tree_for
from capture.tree.tree import Tree

MOST_FAULTS = 8  # calls in a row that have no key, as something goes wrong on the way to it


def guarded(captured: Captured, values: Values, step: Callable[..., Any], *rest: Any) -> Any:
    """The one place where errors of this library are told from those of the body, which come out as they are, and from
    those that options ask for."""
    run = BodyRun(begun=payoff.clock())
    try:
        return _told_apart(captured, values, run, step, *rest)
    except BaseException as error:
        let_go_of_frames(error)
        raise
    finally:
        islands.settle(run)
        run.error = run.watched = None  # an error has this frame: what the body held is to go with the error


def _told_apart(captured: Captured, values: Values, run: BodyRun, step: Callable[..., Any], *rest: Any) -> Any:
    try:
        return body_run.during(run, step, (captured, values, *rest))
    except Exception as error:
        asked_for = isinstance(error, CaptureError) and not isinstance(error, CaptureBug)
        if isinstance(error, UncapturableError) and run.error is not error:
            captured.log.counters.refused_calls += 1
        is_fault = not isinstance(error, BusyError)
        if run.error is error or asked_for or is_interrupt(error) or (is_fault and current_config().strict):
            raise
        if not (is_fault or run.runs or run.replayed):  # nothing is wrong, and nothing has happened
            return run_eagerly(captured, captured.call(captured.completed(values), []), str(error), weight=0.0)
        fault = error
    return _after_fault(captured, values, run, fault)


def _after_fault(captured: Captured, values: Values, run: BodyRun, error: Exception) -> Any:
    """End a call in which something of this library went wrong: by what the body gave, or by running it now."""
    entry: Entry | None = run.entry
    has_result, result = run.has_result, run.result
    may_run = not run.runs and not run.replayed
    try:
        if entry is None:
            captured.faults += not isinstance(error, BusyError)
        elif entry.backend is not None:
            tree = tree_for(entry.backend, captured.pool.number)
            if run.watched is not None and run.error is None and not (has_result or run.replayed):
                has_result, result = record_failure.after_fault(run.watched, tree, run)
                result = finish(result, run.watched.call.leaves)
                may_run = may_run or not run.watched.watch.executes
            _start_over_after_fault(captured, entry, tree, error)
        if not isinstance(error, BusyError):
            tell_fault(captured, error, entry)
    except UncapturableError:  # the annotation asks for it
        raise
    except Exception as another:  # noqa: BLE001 - nothing here may stop the call
        let_through(another)
        captured.faults = MOST_FAULTS + 1
        fault.log(captured, another)
    if not run.replayed and (run.error is not None or has_result or not may_run):
        captured.log.counters.eager_calls += 1
    if run.error is not None:
        raise run.error
    if has_result:
        return finish(result, run.leaves)
    if not may_run:  # what the body did so far cannot be undone
        raise error
    return run_eagerly(
        captured, captured.call(captured.completed(values), []), "something went wrong inside this library"
    )


def _start_over_after_fault(captured: Captured, entry: Entry, tree: Tree, error: Exception) -> None:
    """Drop everything that is known of this key."""
    entry.faults += not isinstance(error, BusyError)
    forget(captured, entry, tree)


def tell_fault(captured: Captured, error: Exception, entry: Entry | None = None) -> None:
    """Report it once. A function with fault after fault runs eagerly from then on."""
    fault.log(captured, error)
    plan = compile_plan(captured.annotation, captured.bare_facts(fault=fault.describe(error)))
    if entry is not None and entry.faults > RETRIES:
        entry.plan, entry.may_change = plan, False
        enter(captured, entry, "eager")
    captured.report(plan)


def give_up(captured: Captured, error: Exception) -> None:
    """Run all calls of this function eagerly."""
    captured.faults = MOST_FAULTS + 1
    tell_fault(captured, error)
