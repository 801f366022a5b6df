"""The graph of a body as it ran, joined to the caller's graph.

This is the result of a region's call in which something of this library went wrong after the body had run. It must
not run again, and its graph, which ends at aliases of what the caller gave, has not become a program. It is used once,
with what it saved in that run; gradients of its gradients raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from capture.torch_private import autograd as torch_autograd


class _Joined(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, results: Sequence[torch.Tensor], edges: Sequence[Any], check: Callable[[], None],
        lending: Callable[[], AbstractContextManager[None]], *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.edges, ctx.check, ctx.lending = edges, check, lending
        return tuple(results)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.check()
        ends, inputs = ctx.edges
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None]
        gradients: Sequence[Any] = [None] * len(inputs)
        if pairs and inputs:
            reached, come = zip(*pairs, strict=True)
            keeps = torch_autograd.keeps_graph() or not torch_autograd.TELLS_KEEP_GRAPH
            with ctx.lending():
                gradients = torch.autograd.grad(reached, inputs, come, retain_graph=keeps, allow_unused=True)
        return (None, None, None, None, *gradients)


def joined(
    results: Sequence[torch.Tensor], ends: Sequence[GradientEdge], edges: Sequence[GradientEdge],
    inputs: Sequence[torch.Tensor], check: Callable[[], None],
    lending: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """``results`` as part of the graph of ``inputs``. ``ends`` and ``edges``: where they are in the body's own graph;
    ``check`` raises where that must not be used any more; in ``lending()`` functions of users find their leaves."""
    with torch.enable_grad():
        made: Sequence[torch.Tensor] = _Joined.apply(results, (ends, edges), check, lending, *inputs)  # type: ignore[no-untyped-call]
    return made
