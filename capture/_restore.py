"""Restore: put Python state back as a snapshot saw it."""

from __future__ import annotations

from collections import deque

from capture._changes import member_paths
from capture._named import MISSING
from capture._state import Change, Snapshot


def restore(before: Snapshot, changed: list[Change]) -> None:
    """Put every changed place and every container's members back as the snapshot saw them."""
    for change in sorted(changed, key=lambda one: not one.container):  # members exist again before they are set
        if change.container:
            _restore_members(before, change)
        elif change.before is MISSING:
            change.place.remove()
        else:
            change.place.set(change.before)


def _restore_members(before: Snapshot, change: Change) -> None:
    for place, container, members in before.members:
        if place is not change.place:
            continue
        values = [before.places[path][1] for path in member_paths(place, container, members)]
        if isinstance(container, list):
            container[:] = values
        elif isinstance(container, dict):
            container.clear()
            container.update(zip(members, values, strict=False))
        elif isinstance(container, (set, deque)):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(members)
