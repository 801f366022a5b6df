"""Containers that the body filled, and then put others in their places: only the snapshot of the state before has them.

A gradient scaler keeps what its step found in a dict, and takes a new dict for the next step. The old one was there
before the body ran, so the snapshot holds it, and with it the tensors that the body put there. They are of no more use,
and no graph can be closed while they take memory of its pool.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from capture.state.diff import content_before
from capture.state.effects import put_members
from capture.state.snapshot import Change, Snapshot

_CONTAINERS = (dict, list, defaultdict, OrderedDict)
_MOST = 1_000  # objects in such containers that are looked at


def empty_dropped(before: Snapshot, changes: Sequence[Change]) -> None:
    """Give such containers the members back that they had before the run, so that the tensors in them are freed. All
    objects of the process are looked at for who holds them, so this is asked only where a tensor would keep the body
    from being recorded."""
    old = [before.sources[path][1] for path in before.rebuilt if path in before.sources]
    old += [change.before for change in changes if not change.container]
    old = [value for value in old if type(value) in _CONTAINERS]
    inside = list(_inside(old))
    tensors = [value for value in inside if type(value) is torch.Tensor]
    if not tensors or len(inside) >= _MOST or not _are_held_alone(before, inside, tensors, old):
        return
    for container in old:
        content = content_before(before, container)
        if content is not None:
            put_members(container, content[1], content[0])


def _inside(containers: Iterable[Any]) -> Iterator[Any]:
    """The containers, and the containers and tensors in them."""
    seen, begun = set[int](), list(containers)
    while begun and len(seen) < _MOST:
        value = begun.pop()
        if id(value) in seen or type(value) not in (*_CONTAINERS, tuple, torch.Tensor) or not gc.is_tracked(value):
            continue
        seen.add(id(value))
        yield value
        if type(value) is not torch.Tensor:
            begun += value.values() if isinstance(value, dict) else value


def _are_held_alone(before: Snapshot, *lists: list[Any]) -> bool:
    """Whether nobody has any of these but each other, the snapshot and changes. The collector does not see what has
    them in a local name, so all references are counted, too: as many are not seen as of a new dict that only the list
    has."""
    inside = lists[0]
    inside.insert(0, {})
    ours = {id(value) for value in (*inside, *lists)}
    for pairs in (before.sources.values(), before.entered, before.members, before.states, before.flags):
        ours |= {id(pairs), *map(id, pairs)}
    ours |= {id(source) for source, _ in before.sources.values()}
    unseen = set[int]()
    for value in inside:
        holders = holders_of(value)
        if any(id(holder) not in ours and type(holder) is not Change for holder in holders):
            return False
        unseen.add(sys.getrefcount(value) - references_to(value, holders))
    return len(unseen) == 1


def holders_of(one: Any) -> list[Any]:
    """What the collector knows to have it. It knows of no local names."""
    return [held for held in gc.get_referrers(one) if type(held) is not types.FrameType]


def references_to(one: Any, holders: Iterable[Any]) -> int:
    """How many references to it these have."""
    return sum(held is one for holder in holders for held in gc.get_referents(holder))
