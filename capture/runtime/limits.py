"""Limits: calls that run eagerly as no recording is to be made for them, and what the user is told of it."""

from __future__ import annotations

from typing import Any

from capture.core.config import current as current_config
from capture.core.facts import GradientObstacle, LimitReached, MemoryForecast
from capture.core.plan import CapturePlan
from capture.rules.compile_plan import compile_plan
from capture.runtime import key_difference, miss_reason
from capture.runtime.budget import AT_LIMIT
from capture.runtime.captured import Captured
from capture.runtime.eager_call import run_eagerly
from capture.runtime.entry import Entry, TrainingRegion
from capture.state.call import Call
from capture.tree.node import Pattern
from capture.tree.tree import Tree


def limit_plan(
    captured: Captured, entry: Entry, bound: Call, tree: Tree, pattern: Pattern | None = None
) -> tuple[LimitReached, CapturePlan]:
    """What asks for one recording more than there may be, and the plan that says so."""
    limit = miss_reason.difference(captured, entry, bound, tree, pattern)
    return limit, compile_plan(captured.annotation, captured.bare_facts(limit=limit))


def run_at_limit(
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


def run_too_large(captured: Captured, bound: Call, too_large: MemoryForecast) -> Any:
    captured.report(too_large_plan(captured, too_large))
    reason = f"a recording would bring {too_large.device} to {too_large.nbytes} bytes of {too_large.limit}"
    return run_eagerly(captured, bound, reason, weight=AT_LIMIT)


WAITS = "another thread runs, which may use the parameters while they are lent to a recording"


def run_beside_threads(captured: Captured, bound: Call, region: TrainingRegion) -> Any:
    """Run eagerly, and say so: in a watched or recorded run parameters are exchanged for others, which other threads
    would see."""
    if region.waits is None:
        obstacle = GradientObstacle(path=None, reason=WAITS)
        facts = captured.bare_facts(gradients=region.uses, gradient_obstacles=(obstacle,))
        region.waits = compile_plan(captured.annotation, facts)
    captured.report(region.waits)
    return run_eagerly(captured, bound, WAITS)


def run_without_key(captured: Captured, entry: Entry, bound: Call) -> Any:
    """Run eagerly, and drop the entry of a key of which nothing is known: it will hardly come again."""
    if not entry.was_watched:
        captured.families.pop(entry.key[:-1], None)
    if captured.hopeless is None:
        return run_given_up(captured, entry, bound)
    captured.report(captured.hopeless)
    return run_eagerly(captured, bound, "every call changes what its key is made of")


def run_given_up(captured: Captured, entry: Entry, bound: Call) -> Any:
    """What was tried led to no replays: run eagerly, and say once what changes."""
    if not captured.budget.gave_up:
        why = "half of what may be tried led to no replay, and this key is new"
        return run_eagerly(captured, bound, why, weight=0.0)
    if not captured.is_told or captured.lives.has_news:
        captured.lives.is_told = captured.lives.owe_most(captured.budget)
        given_up = key_difference.given_up(captured, bound)
        captured.report(compile_plan(captured.annotation, captured.bare_facts(given_up=given_up)))
    return run_eagerly(captured, bound, "recordings of it are not used again")
