"""Names of torch about donated buffers: saved tensors that a compiled backward pass writes into, as it is their last
use. Each is behind a probe with a stated fallback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

DONATED = (
    "this backward pass goes through compiled code that writes into the tensors it saved (donated buffers), so that it "
    "can run once: leave out retain_graph=True, or compile with torch._functorch.config.donated_buffer = False"
)


def _never() -> bool:
    return False


keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", _never)
"""The backward pass under way was asked for with ``retain_graph=True``. False where torch does not tell: what compiled
code writes into would then be seen by a second pass."""
TELLS = keeps_graph is not _never
"""torch tells. Else autograd alone knows when what a pass needs may go."""


def writes_saved(node: Any) -> bool:
    """The node of a compiled function whose backward pass writes into what it saved. Where torch does not tell, all of
    compiled functions are taken for such."""
    forward = getattr(type(node), "_forward_cls", None)
    if forward is None or forward.__name__ != "CompiledFunction":
        return False
    metadata = getattr(forward, "metadata", None)
    return bool(getattr(metadata, "bw_donated_idxs", True))


def allowed() -> contextlib.AbstractContextManager[object]:
    """In the block torch takes it for a last use although the graph stays, to be run with other tensors. Without the
    setting torch makes no such buffers."""
    config = getattr(getattr(torch, "_functorch", None), "config", None)
    if not hasattr(config, "donated_buffer"):
        return contextlib.nullcontext()
    return config.patch(donated_buffer=False)  # type: ignore[union-attr, no-any-return]
