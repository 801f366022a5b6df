"""The part of ``_torch_private`` that has autograd run nodes on another stream than the one they were made on.

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
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_WORD = 8
_NODE = 448  # bytes that are looked at; a leaf's node has some 500
_CUDA = 1  # torch's number of this kind of device


@contextlib.contextmanager
def moved(nodes: Iterable[Any], stream: torch.cuda.Stream) -> Iterator[None]:
    """Inside, autograd runs these nodes on ``stream``, in all threads. Nodes of other devices are left alone, and those
    that are no leaf's, which Python may lay out otherwise."""
    place, kind, kept = _place(stream), _leaf_node(), list(nodes)  # alive until all is as it was
    before: list[tuple[ctypes.c_int64, int]] = []
    try:
        for node in kept:
            if place is None or type(node) is not kind:
                continue
            device, number = _stream_of(node, place)
            if device == _tag(stream.device_index) and number.value != stream.stream_id:
                before.append((number, number.value))
                number.value = stream.stream_id
        yield
    finally:
        for number, old in before:
            number.value = old


def _stream_of(node: Any, place: int) -> tuple[int, ctypes.c_int64]:
    begin = _address(node) + place
    return ctypes.c_uint16.from_address(begin - _WORD).value, ctypes.c_int64.from_address(begin)


def node_of(leaf: torch.Tensor) -> Any:
    """The node at which graphs of a leaf end; it is made if there is none."""
    with torch.inference_mode(False), torch.enable_grad():
        return get_gradient_edge(leaf).node


@functools.cache
def _leaf_node() -> type:
    with torch.inference_mode(False):
        return type(node_of(torch.empty(0, device="cpu", requires_grad=True)))


_places: dict[int, int | None] = {}


def _place(stream: torch.cuda.Stream) -> int | None:
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
