"""Names of torch about autograd, each behind a probe with a stated fallback: the backward pass under way, saved tensors
that compiled code writes into (donated buffers), and the stream that the node of a leaf runs on.

Autograd runs the node of a leaf on the stream that was current when it was made, as long as anybody keeps it: graphs of
earlier losses do, and ``DistributedDataParallel`` does for good. A capture must not touch that stream. torch 2.13 can
look away from it, for the whole process (``set_override_stale_capture_stream``); here the stream that the node keeps is
another one for the length of a capture. Where it lies is found in this process, in nodes made on two streams for it.
Where it is not, the stated fallback is what was before: such bodies are refused while capturing, and run eagerly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_WORD = 8
_NODE = 448  # bytes that are looked at; a leaf's node has some 500
_CUDA = 1  # torch's number of this kind of device

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
"""torch tells. Else autograd alone knows when what a pass needs may go."""


def writes_saved_tensors(node: Any) -> bool:
    """The node of a compiled function whose backward pass writes into what it saved. Where torch does not tell, all of
    compiled functions are taken for such."""
    forward = getattr(type(node), "_forward_cls", None)
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


@contextlib.contextmanager
def nodes_on_stream(nodes: Iterable[Any], stream: torch.cuda.Stream) -> Iterator[None]:
    """Inside, autograd runs these nodes on ``stream``, in all threads. Nodes of other devices are left alone, and those
    that are no leaf's, which Python may lay out otherwise."""
    source, kind, kept = _source_of(stream), _leaf_node(), list(nodes)  # alive until all is as it was
    before: list[tuple[ctypes.c_int64, int]] = []
    try:
        for node in kept:
            if source is None or type(node) is not kind:
                continue
            device, number = _stream_of(node, source)
            if device == _tag(stream.device_index) and number.value != stream.stream_id:
                before.append((number, number.value))
                number.value = stream.stream_id
        yield
    finally:
        for number, old in before:
            number.value = old


def _stream_of(node: Any, source: int) -> tuple[int, ctypes.c_int64]:
    begin = _address(node) + source
    return ctypes.c_uint16.from_address(begin - _WORD).value, ctypes.c_int64.from_address(begin)


def add_hook(node: Any, hook: Callable[..., Any]) -> None:
    """Have autograd call ``hook`` once the node has run. Asked for here, where what torch runs for it is ours: its
    counter of hooks is nothing that a body has read."""
    node.register_hook(hook)


def node_of(leaf: torch.Tensor) -> Any:
    """The node at which graphs of a leaf end; it is made if there is none."""
    with torch.inference_mode(False), torch.enable_grad():
        return get_gradient_edge(leaf).node


@functools.cache
def _leaf_node() -> type:
    with torch.inference_mode(False):
        return type(node_of(torch.empty(0, device="cpu", requires_grad=True)))


_places: dict[int, int | None] = {}


def _source_of(stream: torch.cuda.Stream) -> int | None:
    """Offset of a stream's number in a leaf's node, with the device before it. Nothing runs, so that it may be asked
    for while capturing: nodes of leaves without elements, made on this stream and on the default one."""
    index = stream.device_index
    if index not in _places:
        device, tag, found = torch.device("cuda", index), _tag(index), list[set[int]]()
        for one in (stream, torch.cuda.default_stream(device)):
            with torch.cuda.stream(one), torch.inference_mode(False):
                words = _words(_address(node_of(torch.empty(0, device=device, requires_grad=True))))
            pairs = enumerate(itertools.pairwise(words), 1)
            found.append({_WORD * at for at, (kind, now) in pairs if now == one.stream_id and kind & 0xFFFF == tag})
        both = set.intersection(*found)
        _places[index] = both.pop() if len(both) == 1 else None
    return _places[index]


def _tag(index: int) -> int:
    return _CUDA | index << 8


def _address(node: Any) -> int:
    """Of what the Python object stands for, which comes first in it."""
    return ctypes.c_uint64.from_address(id(node) + object.__basicsize__).value


def _words(address: int) -> list[int]:
    return list((ctypes.c_int64 * (_NODE // _WORD)).from_buffer_copy(ctypes.string_at(address, _NODE)))
