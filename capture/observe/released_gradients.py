"""Frees the memory of gradients that a watched body replaces by others.

The snapshot from before the run holds them, to see what changed. Eager code would free them at once, and its next
gradients would take their memory. So memory of such gradients is given up here if nobody else has them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.key import pytree
from capture.key.pytree import TENSOR_TYPES
from capture.observe.forms import Form
from capture.state.snapshot import Snapshot
from capture.torch_private.capabilities import storage_use_count, use_count

_resize: Any = torch.UntypedStorage.resize_
"""While a body is watched, another one stands in its place."""


@define(eq=False)
class ReleasedGradients:
    """The released gradients of one run."""

    _before: Snapshot
    _versions: list[tuple[torch.Tensor, int]]
    _forms: list[Form]
    _around: Callable[[Callable[..., object]], Callable[..., object]]
    """Puts around ``free`` what it is called through, which holds references, too."""
    _held: Counter[int] = field(factory=Counter)
    """By ``id``: references to a tensor from the snapshot, the versions and the forms."""
    _gone: Counter[int] = field(factory=Counter)
    """By ``id`` of a storage, which the snapshot keeps: tensors on it that were dropped."""

    def free(self, gradient: torch.Tensor) -> None:
        """Free a gradient that the body has dropped. The caller of this holds one reference to it."""
        if not self._held:
            for source, value in self._before.sources.values():
                self._held.update((id(value), id(source.holder)))
            self._held.update(id(tensor) for _, tensor, _ in self._before.flags)
            for space in self._before.namespaces.values():
                self._held.update(map(id, (space.holder, *space.values)))
            self._held.update(id(tensor) for tensor, _ in self._versions)
            self._held.update(id(form.tensor) for form in self._forms)
        if sys.getrefcount(gradient) > _probe_caller(self._around) + self._held[id(gradient)]:
            return
        if type(gradient) in TENSOR_TYPES:
            self._free(gradient)
            return
        members = [member for _, member in pytree.children(gradient)]
        for member, references in zip(members, _references(members), strict=True):
            if type(member) in TENSOR_TYPES and references <= _INSIDE + self._held[id(member)]:
                self._free(member)

    def _free(self, tensor: torch.Tensor) -> None:
        """Give its memory up once all on it are dropped."""
        if tensor.layout is not torch.strided or use_count(tensor) > 1:  # a graph may have saved it
            return
        storage = tensor.untyped_storage()
        self._gone[id(storage)] += 1
        count = self._gone[id(storage)]
        base = tensor._base  # that all on it are views of, as those are that were reduced together
        if base is not None and sys.getrefcount(base) <= _BASE and use_count(base) - 1 <= count:
            count += 1
        mine = bool(self._before.owners(storage)) and storage.resizable()
        if mine and storage_use_count(storage) <= count + 1:
            _resize(storage, 0)


def keep(gradient: torch.Tensor) -> None:
    """Do not free it: it may have to be given back."""


def _references(members: list[Any]) -> list[int]:
    return [sys.getrefcount(member) for member in members]


class _Holder:
    """Holds an object as a tensor that is made of others does."""

    def __init__(self) -> None:
        self.tensor = object()
        self.counted = 0

    def count(self, gradient: Any) -> None:
        """Count references to it as ``free`` does."""
        self.counted = sys.getrefcount(gradient)


def _probe_caller(around: Callable[[Callable[..., object]], Callable[..., object]]) -> int:
    """References to a gradient that was dropped, where nobody else has it. Asked for each: while Dynamo evaluates
    frames, arguments are held once more."""
    old, holder = object(), _Holder()
    count = around(holder.count)
    count(old)
    return holder.counted


def _probe_member() -> int:
    holder = _Holder()
    members = [one for _, one in [("tensor", holder.tensor)]]
    return _references(members)[0]


def _probe_base() -> int:
    view = torch.zeros(2, device="cpu")[:1]
    base = view._base
    return sys.getrefcount(base)


_INSIDE, _BASE = _probe_member(), _probe_base()
"""References to what a gradient that was dropped holds, and to what it is a view of, where nobody else has them."""
