"""Warm up: bring a captured function to replay without a trace in the caller's state."""

from __future__ import annotations

from typing import Any

from capture import _observe, _planning, _record
from capture._bind import Leaf, Unkeyable, key_of
from capture._call import Call
from capture._entry import RETRIES, Entry
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
    entry, leaves = captured.entry_of(values)
    call = captured.call(values, leaves)
    backend = captured.backend_of(entry, leaves)
    if backend is None or entry.phase == "eager" or entry.nodes:
        return
    tree = tree_for(backend)
    if not tree.end_path("warm-up"):
        return
    for _ in range(2 * RETRIES + 2):  # each run either brings the entry on or is one that differs from the last
        phase = _planning.load(captured, entry) if entry.phase == "cold" else entry.phase
        if phase == "cold":
            _observe_once(captured, entry, call)
        elif phase == "eager" or entry.nodes:
            break
        else:
            entry.warmups_left, entry.phase = 0, "ready"
            _record.record(captured, entry, call, tree, tree.pattern(leaves), undo=True)
    tree.end_path("warm-up")


def _observe_once(captured: Captured, entry: Entry, call: Call) -> None:
    watched, described = _planning.watch(captured, call, undo=True, trial=True)
    _observe.undo(watched)
    _planning.take(captured, entry, _planning.compared(entry, described.facts, watched.watch.notes.lines))
