"""Stand-ins: what the body of a region finds in place of the tensors of Python state that need gradients.

Autograd keeps one node for each leaf as long as any graph ends there, and runs it on the stream that was current when
it was made. For the leaf itself that is the stream of some eager call in most cases, which a capture must not touch:
the default stream cannot be captured. A stand-in lies on the same memory, with the same version counter, and its node
is as old as the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from capture._gradients import refuses
from capture._host_reads import gradient_of
from capture._state import Place, Snapshot

_TYPES = (torch.Tensor, torch.nn.Parameter)


@contextlib.contextmanager
def stand_ins(before: Snapshot, arguments: Sequence[Any]) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Replace what ``before`` saw, arguments aside, as long as the context lasts; other threads see that too.

    Gives stand-ins and what they stand for, by ``id`` of the stand-in.
    """
    given = {id(leaf) for leaf in arguments}
    made: dict[int, torch.Tensor] = {}
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    places: list[tuple[Place, torch.Tensor]] = []
    grads: dict[int, torch.Tensor | None] = {}
    try:
        for place, tensor in [owner for owners in before.tensors.values() for owner in owners]:
            if id(tensor) in given or not _needs_one(place, tensor):
                continue
            alias = made.get(id(tensor))
            if alias is None:
                alias = made[id(tensor)] = _alias(tensor)
                found[id(alias)], grads[id(alias)] = (alias, tensor), gradient_of(alias)
            place.set(alias)
            places.append((place, tensor))
        yield found
    finally:
        for place, tensor in places:
            if place.get() is made[id(tensor)]:
                place.set(tensor)
        for alias, tensor in found.values():
            if gradient_of(alias) is not grads[id(alias)]:
                tensor.grad = gradient_of(alias)  # the body ran a backward pass of its own


def _needs_one(place: Place, tensor: torch.Tensor) -> bool:
    if type(tensor) not in _TYPES or not tensor.requires_grad or refuses(tensor) or place.get() is not tensor:
        return False
    if place.kind == "attribute":
        return place.name in getattr(place.holder, "__dict__", ())
    return place.kind == "closure" or (place.kind != "root" and isinstance(place.holder, (dict, list)))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    is_parameter = type(tensor) is torch.nn.Parameter
    alias = torch.nn.Parameter(tensor) if is_parameter else tensor.detach().requires_grad_()
    alias.__dict__.update(tensor.__dict__)
    if tensor.is_leaf:
        alias.grad = gradient_of(tensor)
    return alias
