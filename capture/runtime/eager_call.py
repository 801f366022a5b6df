"""Eager calls: the one place that runs a body eagerly, on the caller's own tensors, and what is counted of it."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from capture.core.config import current as current_config
from capture.key.modes import inlined
from capture.key.pytree import result_leaves
from capture.runtime import payoff
from capture.runtime.captured import Captured
from capture.runtime.checked_replay import verifies
from capture.runtime.entry import Entry
from capture.runtime.phases import give_up_slow
from capture.state.call import Call
from capture.tree.tree import Tree


def is_measured(captured: Captured, entry: Entry) -> bool:
    """Replays of this entry are to be compared with its body, which a call may run in its place. A device of its own
    works on while the host goes on, so there replays are measured where the host reads values alone."""
    if not entry.payoff.is_open or captured.is_backward or entry.backend is None:
        return False
    if entry.backend.has_own_memory and (entry.region is not None or not entry.has_reads):
        return False
    settings = current_config()
    if not settings.drop_slow or settings.poison or verifies(captured):
        return False
    return entry.plan is None or not entry.plan.collectives


def measure_body(captured: Captured, entry: Entry, bound: Call, tree: Tree) -> Any:
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
    note_warm(captured, result, bound, tree)
    if entry.payoff.loss:
        give_up_slow(captured, entry, tree)
    return result


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
    tensors = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
    tree.note_warm(captured, [tensor for tensor in tensors if all(tensor is not leaf for leaf in bound.leaves)])
