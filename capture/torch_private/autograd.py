"""Names of torch about autograd, each behind a probe with a stated fallback: the backward pass under way, saved tensors
that compiled code writes into (donated buffers), and the stream that the node of a leaf runs on.

Autograd runs the node of a leaf on the stream that was current when it was made, as long as anybody keeps it: graphs of
earlier losses do, and ``DistributedDataParallel`` does for good. A capture must not touch that stream. torch 2.13 has a
documented setting for that (``set_override_stale_capture_stream``), for the whole process: it holds while a body that
reaches such nodes is captured, and changes nothing where nobody captures. Before 2.13 the stated fallback is that such
bodies are refused while capturing, and run eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from capture.core.interrupts import let_through

will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
"""Whether the pass under way is going to run a node: not one that leads to none of the inputs it was asked for. Without
it no pass can be told from one for chosen inputs, and gradients of parameters go through autograd."""

DONATED_ERROR = (
    "this backward pass goes through compiled code that writes into the tensors it saved (donated buffers), so that it "
    "can run once: leave out retain_graph=True, or compile with torch._functorch.config.donated_buffer = False"
)


def _graph_is_freed() -> bool:
    return False


keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", _graph_is_freed)
"""The backward pass under way was asked for with ``retain_graph=True``. False where torch does not tell: what compiled
code writes into would then be seen by a second pass."""
TELLS_KEEP_GRAPH = keeps_graph is not _graph_is_freed
"""Whether torch has this function. Else only autograd knows when the tensors that a pass needs may be freed."""


def nodes_above(ends: Sequence[torch.Tensor], left_out: Iterable[Any] = ()) -> Iterator[Any]:
    """The nodes of the graph behind these tensors, without those in ``left_out`` and what only these lead to."""
    seen = {None, *left_out}
    stack: list[Any] = [tensor.grad_fn for tensor in ends]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack.extend(above for above, _ in node.next_functions)


def is_end_of_pass(node: Any) -> bool:
    """Whether the backward pass under way was asked for the gradients that come to this node, and not for those of what
    is behind it. Without the name of torch nobody can tell."""
    if will_execute is None or not will_execute(node):
        return False
    try:
        return not any(will_execute(above) for above, _ in node.next_functions if above is not None)
    except RuntimeError as error:  # torch tells of no leaf in a pass for chosen inputs, but that it would be come to
        let_through(error)
        return False


CLEARS_SAVED = hasattr(torch.autograd.function.BackwardCFunction, "maybe_clear_saved_tensors")
"""Whether torch lets what a node of a user's function saved be freed before the node runs. Else one pass frees all that
a call saved, and a second one raises."""


def clear_saved(node: Any) -> None:
    """Free what such a node saved, unless the backward pass under way keeps its graph."""
    node.maybe_clear_saved_tensors()


def function_of(node: Any) -> type | None:
    """The class with the user's ``backward`` that the node runs; None for a node of torch's. Without the name no node
    is one of a user's."""
    return getattr(type(node), "_forward_cls", None)


@functools.cache
def _names_of_saved(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def unpack_saved(node: Any) -> None:
    """Have autograd unpack all that the node saved. Raises ``LookupError`` where it does not."""
    try:
        kind: Any = type(node)
        for name in ("saved_tensors",) if function_of(node) is not None else _names_of_saved(kind):
            getattr(node, name)
    except RuntimeError as error:
        raise LookupError from error


def name_of(node: Any) -> str:
    """The node's name. A user's function may have set an attribute ``name`` on it, as its ``ctx``."""
    name: str = type(node).name(node)
    return name


def is_leaf_node(node: Any) -> bool:
    """Whether the node adds to the ``grad`` of a leaf, which is its ``variable``."""
    return not isinstance(node, torch.autograd.function.BackwardCFunction) and hasattr(node, "variable")


_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]

NO_NUMBER = -2
"""Follows on no number, and none on it."""


def _no_number(*_: object) -> int:
    return NO_NUMBER


next_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", _no_number)
"""The number that the next node made in this thread gets. Where torch does not tell it, or that of a node, no two nodes
are known to follow each other."""
number_of: Callable[[Any], int] = getattr(torch.autograd.function.BackwardCFunction, "_sequence_nr", _no_number)
"""The number of the node of a Python function."""


def sequence_number(node: Any) -> int:
    """That of any node: one that is made later has a greater one. Where torch does not tell it, all have the same."""
    return int(getattr(node, "_sequence_nr", _no_number)())


def _holders(reference: weakref.ref[torch.Tensor]) -> tuple[int, int] | None:
    """Who holds a tensor, as Python and as torch count; None if it is gone."""
    tensor = reference()
    return None if tensor is None else (sys.getrefcount(tensor), _use_count(tensor))


def _holders_of_saved() -> tuple[int, int] | None:
    """``_holders`` of a tensor that one node saved and nobody else has; None where others could look alike."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        tensor = leaf + leaf
        reference, powers = weakref.ref(tensor), [tensor**2]
        others = [_holders(reference)]
        part = tensor[:]
        del tensor
        others.append(_holders(reference))
        del part
        alone = _holders(reference)
        powers.append(reference() ** 2)  # type: ignore[operator]
        others.append(_holders(reference))
    return None if alone in others else alone


_SAVED_ONCE = _holders_of_saved()


def is_only_saved(reference: weakref.ref[torch.Tensor]) -> bool:
    """Whether the tensor is gone, or held by one node alone, which saved it. False where that is not known."""
    holders = _holders(reference)
    return holders is None or holders == _SAVED_ONCE


def hooks_of_accumulation(leaf: torch.Tensor) -> list[int]:
    """Numbers of the hooks on the node that adds to the leaf's gradient. torch gives no list of them, and makes one
    where a hook is added; but the collector sees the dicts that they are in, where nothing but Python has the node. A
    leaf that only its Python object refers to has no node."""
    if _use_count(leaf) <= 1 or not leaf.requires_grad or leaf.grad_fn is not None:
        return []
    with torch.inference_mode(mode=False), torch.enable_grad():
        node: Any = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    return [number for table in gc.get_referents(node) if isinstance(table, dict) for number in (-1, *table)]


def add_prehook(node: Any, hook: Callable[..., Any]) -> Any:
    """Have autograd call ``hook`` before the node runs, whatever attributes a user's function has set on it."""
    return type(node).register_prehook(node, hook)


_at_end = getattr(getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", None)


def at_end_of_pass(function: Callable[[], None]) -> None:
    """Have autograd call this when the backward pass that runs now is over. Where torch cannot, nothing calls it."""
    if _at_end is not None:
        _at_end(function)


LOOKING_UP_BACKWARD = tuple(
    one for one in vars(torch.autograd.function.BackwardCFunction).values() if isinstance(one, types.FunctionType)
)
"""Methods of such nodes, which look ``backward`` and its kin up in the class."""


def writes_saved_tensors(node: Any) -> bool:
    """Whether it is the node of a compiled function whose backward pass writes into what it saved. Where torch does not
    tell, every node of a compiled function counts as one."""
    forward = function_of(node)
    if forward is None or forward.__name__ != "CompiledFunction":
        return False
    metadata = getattr(forward, "metadata", None)
    return bool(getattr(metadata, "bw_donated_idxs", True))


def donation_allowed() -> contextlib.AbstractContextManager[object]:
    """In the block torch takes it for a last use although the graph stays, to be run with other tensors. Without the
    setting torch makes no such buffers."""
    config = getattr(getattr(torch, "_functorch", None), "config", None)
    if not hasattr(config, "donated_buffer"):
        return contextlib.nullcontext()
    return config.patch(donated_buffer=False)  # type: ignore[union-attr, no-any-return]


_override: Callable[[bool], object] | None = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
_is_overridden: Callable[[], bool] | None = getattr(torch._C, "_override_stale_capture_stream", None)
TAKES_STALE_STREAMS = _override is not None and _is_overridden is not None
"""What is captured may reach nodes that were made on another stream."""


@contextlib.contextmanager
def stale_streams_overridden() -> Iterator[None]:
    """Inside, autograd runs nodes that belong to streams that are not captured on the one that is, in all threads that
    capture. Without the setting nothing changes."""
    if _override is None or _is_overridden is None or _is_overridden():
        yield
        return
    _override(True)
    try:
        yield
    finally:
        _override(False)


def add_hook(node: Any, hook: Callable[..., Any]) -> None:
    """Have autograd call ``hook`` once the node has run. Asked for here, where what torch runs for it is ours: its
    counter of hooks is nothing that a body has read."""
    type(node).register_hook(node, hook)
