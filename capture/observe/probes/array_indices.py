"""NumPy arrays as indices of tensors.

torch makes a tensor of such an array where the indexed one lies. On a device no operator tells of that copy, and of a
short array torch asks for each member besides. In the block the tensor is made on the array's memory instead, so that
the array is found by it, as where a body says ``torch.from_numpy``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from capture.key.array_inputs import may_be_input
from capture.torch_private.monkeypatch import replaced

_AS_TUPLE = 32
"""With fewer rows an array of several dimensions is taken for a tuple of indices by some versions of torch."""
_INTEGERS = frozenset(["int8", "int16", "int32", "int64"])
_KEPT = frozenset(["bool", "uint8"])
"""Kinds of masks: all others become 64-bit integers."""


@contextmanager
def array_indices(plain: Callable[[Any], Any] = lambda index: index) -> Iterator[None]:
    """``plain``: gives the plain array that an index stands for, and any other index as it is."""
    thread = threading.get_ident()

    def get(self: torch.Tensor, index: Any) -> Any:
        return get_item(self, index if threading.get_ident() != thread else _as_tensors(index, plain))

    def put(self: torch.Tensor, index: Any, value: Any) -> None:
        set_item(self, index if threading.get_ident() != thread else _as_tensors(index, plain), value)

    get_item, set_item = torch.Tensor.__getitem__, torch.Tensor.__setitem__
    with replaced(torch.Tensor, {"__getitem__": get, "__setitem__": put}):
        yield


def _as_tensors(index: Any, plain: Callable[[Any], Any]) -> Any:
    """A list of arrays is not one that torch makes tensors on."""
    if type(index) is tuple:
        return tuple([_as_tensor(plain(one)) for one in index])
    index = plain(index)
    return _as_tensor(index) if may_be_input(index) and (index.ndim == 1 or len(index) >= _AS_TUPLE) else index


def _as_tensor(index: Any) -> Any:
    if not (may_be_input(index) and index.ndim):  # of one number without dimensions torch takes the value
        return index
    name = index.dtype.name
    if name in _KEPT:
        return torch.from_numpy(index)
    return torch.from_numpy(index).to(torch.int64) if name in _INTEGERS else index
