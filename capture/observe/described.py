"""The live parts of one watched run: tensors that it read, and leaves and effects that it left.

The facts beside them are plain data; these parts hold the run's own tensors until a recording is made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.core.facts import Facts
from capture.key.tensor_kind import AsArray, OnHost, TensorKind, is_leaf
from capture.observe.host_copies import HostCopies
from capture.observe.trace import External
from capture.state.snapshot import Change
from capture.state.source import Source

LeafKind = Literal["fresh", "input", "input-view", "static", "static-view", "python", "foreign"]
MADE: tuple[LeafKind, ...] = ("fresh", "input-view", "static-view")
"""Kinds of tensors that the body made, also on memory of the caller."""


@frozen(eq=False)
class ImplicitInput:
    """An implicit input: the places that hold the tensor (empty: none is known), and its memory. ``also``: places that
    hold other tensors on the same memory.
    """

    path: str
    owners: tuple[tuple[Source, torch.Tensor], ...]
    external: External
    also: tuple[tuple[Source, torch.Tensor], ...] = ()


@frozen(eq=False)
class KeptLeaf:
    """One leaf of an output or effect: what it is and where it came from.

    ``source``: position of the argument leaf for inputs, the implicit's path for statics.
    """

    path: str
    value: Any
    kind: LeafKind
    source: int | str | None = None
    array: AsArray | None = None
    """The body left an array on this tensor's memory, or what is made of it."""
    host: OnHost | None = None
    """The body left a copy on the host of this tensor."""
    read: Any = None
    """Of a number that the host reads anew in each call: the number of the read, among those of the run; that and how
    it follows from the read, if it is computed; or its formula (``observe.computed``). None for any other leaf."""


def kinds_of(leaves: Sequence[KeptLeaf]) -> dict[int, TensorKind]:
    """What all tensors that a body made and left are beside their memory, by position: see ``TensorKind``. Graphs are
    kinds where each of them was freed and has only detached aliases (``log.append(loss.detach())``); else forward and
    backward are recorded apart, or the call is eager."""
    made = {at: leaf.value for at, leaf in enumerate(leaves) if leaf.kind in MADE}
    kinds = {at: TensorKind.of(tensor) for at, tensor in made.items()}
    attached = {at: tensor for at, tensor in made.items() if not is_leaf(tensor)}
    if attached:
        graphs = Counter(
            id(tensor.untyped_storage()) for tensor in {id(one): one for one in attached.values()}.values()
        )
        others = {at: tensor for at, tensor in made.items() if at not in attached}
        bound = {
            id(tensor.untyped_storage()) for at, tensor in others.items()
            if kinds[at] is not None or leaves[at].array is not None or tensor._is_view()
        }  # fmt: skip
        freed = {
            at: TensorKind.of_freed_graph(tensor)
            for at, tensor in attached.items()
            if leaves[at].kind == "fresh" and graphs[key := id(tensor.untyped_storage())] == 1 and key not in bound
        }
        kinds |= freed if len(freed) == len(attached) and all(freed.values()) else {}
    return {at: kind for at, kind in kinds.items() if kind is not None}


@frozen(eq=False)
class KeptEffect:
    """A place the body gave a new value that holds tensors, with the value's leaves."""

    change: Change
    leaves: tuple[KeptLeaf, ...]


def _on_device(copies: HostCopies, leaves: Sequence[KeptLeaf]) -> list[KeptLeaf]:
    found = [None if leaf.host is None else copies.of(leaf.value) for leaf in leaves]
    return [
        leaf if copy is None or copy.there is None else evolve(leaf, value=copy.there)
        for leaf, copy in zip(leaves, found, strict=True)
    ]


@define
class DescribedRun:
    """The facts of a watched run, and its live parts."""

    facts: Facts
    implicit: list[ImplicitInput] = field(factory=list)
    outputs: list[KeptLeaf] = field(factory=list)
    effects: list[KeptEffect] = field(factory=list)
    guarded: list[ImplicitInput] = field(factory=list)
    """Tensors that the body can reach and that kernels of unknown memory may use: they must not move either."""
    computed: Any = None
    """Formulas of what the run left (``observe.computed.Computed``)."""
    unread: frozenset[str] = frozenset()
    """Paths of inputs that no operator got: they are returned, or not used."""

    def with_copies(self, copies: HostCopies) -> DescribedRun:
        """The run with values on the device in the place of copies on the host, where it is recorded."""
        self.outputs = _on_device(copies, self.outputs)
        self.effects = [evolve(effect, leaves=tuple(_on_device(copies, effect.leaves))) for effect in self.effects]
        return self
