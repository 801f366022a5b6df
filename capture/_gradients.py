"""Gradients: who asks for gradients that outlive a run, and what keeps the backward pass from being recorded apart.

A backward pass inside the body that leaves nothing behind is nobody's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from capture._facts import GradientObstacle, GradientUse
from capture._notes import External
from capture._observe import Watched
from capture._state import Place

if TYPE_CHECKING:
    from capture._describe import KeptEffect, KeptLeaf

_RECOMPUTES = "CheckpointFunctionBackward"
Arguments = Callable[[torch.UntypedStorage], Sequence[tuple[int, torch.Tensor]]]
"""Argument leaves on a storage."""


def uses(watched: Watched, arguments: Arguments, kept: Sequence[KeptLeaf]) -> list[GradientUse]:
    """Who asks for gradients; empty if nothing that is left has an autograd graph."""
    left = [leaf.value for leaf in kept if isinstance(leaf.value, torch.Tensor)]
    left += [one.tensor for one in watched.watch.notes.externals.values() if one.mutation is not None]
    if not any(tensor.grad_fn is not None for tensor in left):
        return []
    found = []
    for (storage, _), use in watched.watch.notes.gradients.items():
        external = watched.watch.notes.externals.get(storage)
        path = _path(watched, arguments, external) if external is not None else None
        found.append(GradientUse(path=path, op=use.op, where=use.where))
    return found or [GradientUse(path=None, op="output requires grad")]


def obstacles(
    watched: Watched, arguments: Arguments, outputs: Sequence[KeptLeaf], effects: Sequence[KeptEffect]
) -> list[GradientObstacle]:
    """Why forward and backward cannot be a pair of recordings; empty if they can."""
    found = [*_outputs(outputs), *_effects(effects), *_externals(watched, arguments)]
    notes = watched.watch.notes
    found += [GradientObstacle(path=None, reason=f"the body uses {name}", where=at) for name, at in notes.hooks]
    if any(node.name() == _RECOMPUTES for node in _nodes(watched, outputs)):
        found.append(GradientObstacle(path=None, reason="the body is recomputed in the backward pass"))
    return found


def _path(watched: Watched, arguments: Arguments, external: External) -> str | None:
    there = arguments(external.storage)
    owners = watched.before.owners(external.storage)
    return watched.arguments[there[0][0]][0] if there else (owners[0][0].path if owners else None)


def _outputs(outputs: Sequence[KeptLeaf]) -> Iterator[GradientObstacle]:
    seen: dict[int, torch.Tensor] = {}
    for leaf in outputs:
        if not isinstance(leaf.value, torch.Tensor) or not leaf.value.requires_grad:
            continue
        if leaf.kind != "fresh":
            yield GradientObstacle(path=leaf.path, reason=f"{leaf.path} is no new tensor ({leaf.kind})")
        elif seen.setdefault(id(leaf.value.untyped_storage()), leaf.value) is not leaf.value:
            yield GradientObstacle(path=leaf.path, reason=f"{leaf.path} shares memory with another output")


def _effects(effects: Sequence[KeptEffect]) -> Iterator[GradientObstacle]:
    for effect in effects:
        place: Place = effect.change.place
        if place.name == "grad" and isinstance(place.holder, torch.Tensor):
            yield GradientObstacle(path=place.path, reason="the body runs a backward pass of its own")
        elif any(isinstance(leaf.value, torch.Tensor) and leaf.value.requires_grad for leaf in effect.leaves):
            yield GradientObstacle(path=place.path, reason=f"{place.path} is left with an autograd graph")


def _externals(watched: Watched, arguments: Arguments) -> Iterator[GradientObstacle]:
    for external in watched.watch.notes.externals.values():
        tensor = external.tensor
        path = _path(watched, arguments, external)
        if external.mutation is not None and tensor.requires_grad:
            reason = f"{path or 'a tensor'} is written"
            yield GradientObstacle(path=path, reason=reason, where=external.mutation.where)


def _nodes(watched: Watched, outputs: Sequence[KeptLeaf]) -> Iterator[Any]:
    """Nodes of the graph that the body made: up to those that its inputs came with."""
    inputs = [leaf for _, leaf in watched.arguments if isinstance(leaf, torch.Tensor)]
    inputs += [one.tensor for one in watched.watch.notes.externals.values()]
    yield from nodes_of(
        [leaf.value for leaf in outputs if isinstance(leaf.value, torch.Tensor)],
        {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None},
    )


def nodes_of(tensors: Sequence[torch.Tensor], stops: set[Any]) -> Iterator[Any]:
    """All nodes above some tensors, ``stops`` and what is above them left out."""
    stack, seen = [tensor.grad_fn for tensor in tensors], set(stops)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(above for above, _ in node.next_functions)
