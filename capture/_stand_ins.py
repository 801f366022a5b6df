"""Stand-ins: what the body of a region finds in place of the tensors of Python state that need gradients.

Autograd keeps one node for each leaf as long as any graph ends there, and runs it on the stream that was current when
it was made: that of some eager call, which a capture must not touch, as the default stream cannot be captured. Where
anybody in C++ holds a leaf there may be such a graph. A stand-in lies on the same memory, with the same version
counter, and its node is as old as the run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from capture._gradients import refuses
from capture._host_reads import gradient_of
from capture._state import Place, Snapshot
from capture._torch_private import leaf_like, use_count

_TYPES = (torch.Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def stand_ins(before: Snapshot, arguments: Sequence[Any]) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Replace what ``before`` saw, arguments aside, as long as the context lasts; other threads see that too.

    Gives stand-ins and what they stand for, by ``id`` of the stand-in.
    """
    given = {id(leaf) for leaf in arguments}
    made: dict[int, torch.Tensor] = {}
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    places: list[tuple[Place, Any, Any]] = []
    grads: dict[int, torch.Tensor | None] = {}
    try:
        for place, tensor in [owner for owners in before.tensors.values() for owner in owners]:
            if id(tensor) in given or not _needs_one(place, tensor):
                continue
            alias = made.get(id(tensor))
            if alias is None:
                alias = made[id(tensor)] = _alias(tensor)
                found[id(alias)], grads[id(alias)] = (alias, tensor), gradient_of(alias)
            places.append((place, tensor, alias))
        places += _references(before, made) if made else []
        for place, _, alias in places:
            place.set(alias)
        yield found
    finally:
        for place, was, now in places:
            if place.get() is now:
                place.set(was)
        for alias, tensor in found.values():
            if gradient_of(alias) is not grads[id(alias)]:
                tensor.grad = gradient_of(alias)  # the body ran a backward pass of its own
            alias.grad = None  # the program's graph keeps the stand-in, and would keep the gradient


def _references(before: Snapshot, made: dict[int, torch.Tensor]) -> Iterator[tuple[Place, Any, Any]]:
    """Weak references to what is replaced, as those by which ``nn.LSTM`` looks whether it still has its weights."""
    for place, value in before.places.values():
        if type(value) is weakref.ref and id(value()) in made and _is_settable(place):
            yield place, value, weakref.ref(made[id(value())])


def _needs_one(place: Place, tensor: torch.Tensor) -> bool:
    if type(tensor) not in _TYPES or not tensor.requires_grad or refuses(tensor) or place.get() is not tensor:
        return False
    return (not tensor.is_leaf or use_count(tensor) > 1) and _is_settable(place)


def _is_settable(place: Place) -> bool:
    if place.kind == "attribute":
        return place.name in getattr(place.holder, "__dict__", ())
    return place.kind == "closure" or (place.kind != "root" and isinstance(place.holder, (dict, list)))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    alias = leaf_like(tensor)
    alias.__dict__.update(tensor.__dict__)
    if tensor.is_leaf:
        alias.grad = gradient_of(tensor)
    return alias
