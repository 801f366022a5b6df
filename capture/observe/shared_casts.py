"""Weights that autocast casts once for several calls.

In a block of ``torch.autocast`` eager code casts a weight once. All uses in the block add their gradients to those of
the cast, in the low precision, and the sum is cast back. A recording casts the weight for itself, which gives the same
values; but its gradient has to go where those of the other calls in the block go. So the calls of a block share one
tensor a weight that has the cast's place in the graph, and no memory of its own: nobody reads its values.

A watched run whose graph is the caller's makes real casts; those are then what later calls of the block share.

It costs what eager's own casts do, so it is done for functions that were seen to meet others in a block: their graphs
end at the casts. All others note what they cast; where they meet others later, calls to come are eager.

Known limits: eager code in the same block casts the weight once more, for itself, and so does the first watched run of
a key after another call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from capture.key.pytree import result_leaves
from capture.key.tensor_kind import is_leaf
from capture.torch_private import autocast, devices
from capture.torch_private.autograd import nodes_above


class _Casts(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [weight.dtype for weight in weights]
        kinds = [(dtype, weight.device) for dtype, weight in zip(dtypes, weights, strict=True)]
        single = {kind: torch.empty((), dtype=kind[0], device=kind[1]) for kind in dict.fromkeys(kinds)}
        return tuple(single[kind].expand(weight.shape) for kind, weight in zip(kinds, weights, strict=True))

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back = [one if one is None else one.to(dtype) for one, dtype in zip(grads, ctx.dtypes, strict=True)]
        return (None, *back)


def is_in_a_block() -> bool:
    """Whether autocast casts weights once for the calls around this one."""
    return torch.is_grad_enabled() and any(map(autocast.low_precision, devices.AUTOCAST_TYPES))


def found_above(ends: Sequence[torch.Tensor]) -> dict[tuple[Any, int], torch.Tensor]:
    """Leaves that were cast once in the graph above these tensors, to what autocast casts to, by the cast's place in
    it. A leaf that is cast several times was cast by users' code, too, or nothing keeps casts."""
    leaves: dict[tuple[Any, int], torch.Tensor] = {}
    times = Counter[int]()
    for node in nodes_above(ends):
        cast = autocast.cast_of(node)
        if cast is None:
            continue
        leaf: torch.Tensor = cast[0].variable
        is_kept = leaf.dtype is torch.float32 and cast[1] is autocast.low_precision(leaf.device.type)
        if is_kept and not leaf._is_view():
            times[id(leaf)] += 1
            leaves[node, 0] = leaf
    return {place: leaf for place, leaf in leaves.items() if times[id(leaf)] == 1}


Casts = Sequence[torch.dtype | None]
"""For each of some weights, the dtype that autocast casts it to; None for one that it does not cast."""


def keep(result: Any) -> bool:
    """Keep the casts that a result's graph, which is the caller's, ends in and that are in autocast's cache now: later
    calls share them. True if other calls of the block cast some of the weights before."""
    ends = [
        leaf_of_result
        for _, leaf_of_result in result_leaves(result)
        if isinstance(leaf_of_result, torch.Tensor) and not is_leaf(leaf_of_result)
    ]
    leaves = found_above(ends) if ends and is_in_a_block() else {}
    around, kept = autocast.kept_around(), autocast.kept_with_cache() if leaves else {}
    for (node, _), leaf in leaves.items():
        cast = autocast.looked_up(leaf, node)
        if cast is not None:
            kept.setdefault(_key(leaf), (leaf, cast))
    return are_known(leaves.values(), around)


def are_known(leaves: Iterable[torch.Tensor], kept: Mapping[Any, Any]) -> bool:
    """Whether another call of the block cast one of these leaves."""
    return bool(kept) and any(_key(leaf) in kept for leaf in leaves)


def _key(leaf: torch.Tensor) -> Any:
    return id(leaf), autocast.low_precision(leaf.device.type)


def meets_others(weights: Sequence[torch.Tensor], casts: Casts) -> bool:
    """Whether another call of this block cast one of these weights, too. Those of this call are noted."""
    kept = autocast.kept_with_cache()
    keys = [(id(weight), dtype) for weight, dtype in zip(weights, casts, strict=True) if dtype is not None]
    met = bool(kept) and not kept.keys().isdisjoint(keys)
    for key, weight in zip(keys, (one for one, dtype in zip(weights, casts, strict=True) if dtype), strict=True):
        kept.setdefault(key, (weight, None))
    return met


def shared(weights: Sequence[torch.Tensor], casts: Casts) -> list[torch.Tensor]:
    """The tensors that gradients go to: for a weight that is cast the one that all calls of this block share."""
    kept = autocast.kept_with_cache()
    keys = [None if dtype is None else (id(weight), dtype) for weight, dtype in zip(weights, casts, strict=True)]
    new = {
        key: weight
        for key, weight in zip(keys, weights, strict=True)
        if key is not None and kept.get(key, (None, None))[1] is None
    }
    if new:
        made = _Casts.apply([dtype for _, dtype in new], *new.values())  # type: ignore[no-untyped-call]
        kept.update(zip(new, zip(new.values(), made, strict=True), strict=True))
    return [weight if key is None else kept[key][1] for key, weight in zip(keys, weights, strict=True)]
