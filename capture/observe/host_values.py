"""Values of a tensor that the host reads without an operator: a list, an array, or a text.

Each read is described by a text, so that a replay can read again and compare. Equal texts mean that Python got the
same: a list with the same members, an array with the same bits, the same characters.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from capture.core.data import frozen
from capture.key.pytree import TENSOR_TYPES
from capture.key.tensor_meta import bytes_of, digest
from capture.torch_private.capabilities import unseen

Describe = Callable[..., Any]
"""Describes a read as text, from the tensor and the other arguments of the read; of a list that is only returned it
gives the members."""
_MOST_WRITTEN_OUT = 64  # elements: a longer list is described by a digest
_WITH_FRACTIONS = "with fractions"
_tolist: Any = torch.Tensor.tolist  # torch's own, also while a body is watched
_repr: Any = torch.Tensor.__repr__
_format: Any = torch.Tensor.__format__
MOST_MEMBERS = 1024
"""Members of a list that are put into a result one by one."""
ARRAYS = ("numpy", "__array__")
"""Reads whose result shares the tensor's memory."""


def describer_of(name: str, tensor: torch.Tensor) -> Describe | None:
    """The function that describes this read of this tensor; None where the read cannot be repeated from the host's
    memory alone."""
    plain = type(tensor) in TENSOR_TYPES and tensor.layout is torch.strided and not tensor.is_quantized
    plain = plain and tensor.is_cpu
    if not plain or tensor.is_nested or not tensor.numel() or tensor.is_neg() or tensor.is_conj():
        return None
    if name in ("__repr__", "__format__") and tensor.requires_grad:
        return None  # the text has the name of a node of the graph, which a replay does not make
    return _DESCRIBERS.get(name)


def is_whole(text: str) -> bool:
    """Whether the value has no fraction: it is likely to come again."""
    return re.search(rf"\.0*[1-9]|\d[eE]-|nan|inf|{_WITH_FRACTIONS}", text) is None


def _list(tensor: torch.Tensor) -> str:
    if tensor.numel() > _MOST_WRITTEN_OUT:
        return _array(tensor)
    return f"{tensor.dtype} {_tolist(tensor)!r}"


def flat_list(tensor: torch.Tensor) -> list[Any]:
    """All members of the lists that ``tolist`` gives, in their order."""
    members: list[Any] = _tolist(tensor.reshape(-1))
    return members


def _array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    del args, kwargs  # they follow from the code
    broken = tensor.is_floating_point() and not bool((tensor == tensor.round()).all())
    kind = f" {_WITH_FRACTIONS}" if broken or tensor.is_complex() else ""
    return f"{tensor.dtype}{list(tensor.shape)}{kind} {digest(tensor)}"


def _text(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    return str(_repr(tensor, *args, **kwargs))


def _formatted(tensor: torch.Tensor, spec: str) -> str:
    return str(_format(tensor, spec))


HOST_ARGUMENTS = {
    "lstm": "batch_sizes", "gru": "batch_sizes", "rnn_tanh": "batch_sizes", "rnn_relu": "batch_sizes",
    "_pack_padded_sequence": "lengths", "_pad_packed_sequence": "batch_sizes",
    "tensor_split": "tensor_indices_or_sections",
}  # fmt: skip
"""Functions that read their second argument on the host, and what it is called."""
_DESCRIBERS: dict[str, Describe] = {
    "tolist": _list, "numpy": _array, "__array__": _array, "__repr__": _text, "__format__": _formatted,
    **dict.fromkeys(HOST_ARGUMENTS, _list),
}  # fmt: skip


@frozen(eq=False)
class _Lent:
    storage: weakref.ref[torch.UntypedStorage]
    array: Callable[[], Any]
    content: str


class Arrays:
    """Memory that was handed out as arrays. Later reads through an array see the described content as long as nobody
    writes it: neither an operator while the array exists, nor other code that has an array."""

    def __init__(self) -> None:
        self.known: dict[int, _Lent] = {}
        """By ``id`` of the storage. Each operator asks whether there are any."""

    def __bool__(self) -> bool:
        return bool(self.known)

    def add(self, tensor: torch.Tensor, array: Any) -> None:
        """The array lies on its memory, as do views of the array, which keep it alive."""
        storage = tensor.untyped_storage()
        self.known[id(storage)] = _Lent(weakref.ref(storage), weakref.ref(array), _content(storage))

    def all(self) -> list[torch.UntypedStorage]:
        """The memory that still exists."""
        return [found for found in (one.storage() for one in self.known.values()) if found is not None]

    def have_changed(self, storages: Iterable[Any]) -> bool:
        """Whether the content of an array differs from its description."""
        return any(_content(storage) != one.content for storage, one in self._lent(storages))

    def may_see(self, written: Iterable[Any]) -> bool:
        """Whether an operator wrote these, and an array on one of them is there."""
        found = self._lent(written)
        for storage, one in found:
            if one.array() is None:
                del self.known[id(storage)]
        return any(one.array() is not None for _, one in found)

    def knows(self, storage: Any) -> bool:
        """Whether it is such memory."""
        return bool(self._lent([storage]))

    def _lent(self, storages: Iterable[Any]) -> list[tuple[Any, _Lent]]:
        known = [(storage, self.known[id(storage)]) for storage in storages if id(storage) in self.known]
        return [(storage, one) for storage, one in known if one.storage() is storage]

    def forget(self) -> None:
        """Forget all arrays: the run is over."""
        self.known.clear()


def _content(storage: torch.UntypedStorage) -> str:
    with unseen():
        return digest(bytes_of(storage))
