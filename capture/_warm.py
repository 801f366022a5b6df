"""Warm up: bring a captured function to replay without a trace in the caller's state."""

from __future__ import annotations

from typing import Any

from capture import _observe, _record
from capture._bind import Leaf, Unkeyable, key_of
from capture._compile import compile_plan
from capture._describe import describe
from capture._runtime import Captured
from capture._tree import tree_for


def leaves_of(values: tuple[Any, ...]) -> list[Leaf]:
    """Dynamic leaves of bound values, in the order of the key."""
    leaves: list[Leaf] = []
    for value in values:
        try:
            key_of(value, leaves)
        except (Unkeyable, TypeError):
            continue
    return leaves


def warm_up(captured: Captured, values: tuple[Any, ...]) -> None:
    """Observe and record one call, undoing both runs."""
    entry, leaves = captured.entry_for(values)
    call = captured.call(values, leaves)
    backend = captured.backend_of(entry, leaves)
    if backend is None or entry.phase == "eager" or entry.nodes:
        return
    tree = tree_for(backend)
    if not tree.end_path("warm-up"):
        return
    while entry.phase == "cold":
        captured.load(entry)
        if entry.phase == "cold":
            _observe_once(captured, entry, call)
    if entry.phase == "eager":
        return
    entry.warmups_left, entry.phase = 0, "ready"
    tries = 0
    while entry.phase == "ready" and not entry.nodes and tries < 4:
        tries += 1
        _record.record(captured, entry, call, tree, tree.pattern(leaves), undo=True)
        if entry.phase == "warm":
            entry.phase = "ready"
    tree.end_path("warm-up")


def _observe_once(captured: Captured, entry: Any, call: Any) -> None:
    captured.log.counters.observations += 1
    captured.log.counters.body_runs += 1
    with _observe.capture_lock, captured.log.timed("observe"):
        watched = _observe.run_watched(call, _observe.Watch(undo=True))
        try:
            if watched.error is not None:
                raise watched.error
            described = describe(watched)
        finally:
            _observe.undo(watched)
    facts = captured.compared(entry, described.facts, watched.watch.notes.lines)
    captured.adopt(entry, facts, compile_plan(captured.annotation, facts))
