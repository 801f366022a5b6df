"""What one watched run was, in live parts: tensors that it read, leaves and effects that it left.

The facts beside them are plain data; these hold the run's own tensors, for as long as a recording is made of it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from attrs import define, field, frozen

from capture.core.facts import Facts
from capture.observe.trace import External
from capture.state.snapshot import Change
from capture.state.source import Source

LeafKind = Literal["fresh", "input", "input-view", "static", "static-view", "python", "foreign"]
MADE: tuple[LeafKind, ...] = ("fresh", "input-view", "static-view")
"""Tensors that the body made, whosever memory they are on."""


@frozen(eq=False)
class ImplicitInput:
    """An implicit input: the places that hold the tensor (empty: nobody known), and its memory.

    ``also``: places that hold other tensors on the same memory.
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


@frozen(eq=False)
class KeptEffect:
    """A place the body gave a new value that holds tensors, with the value's leaves."""

    change: Change
    leaves: tuple[KeptLeaf, ...]


@define
class DescribedRun:
    """Facts of a watched run, and its live parts."""

    facts: Facts
    implicit: list[ImplicitInput] = field(factory=list)
    outputs: list[KeptLeaf] = field(factory=list)
    effects: list[KeptEffect] = field(factory=list)
    guarded: list[ImplicitInput] = field(factory=list)
    """Tensors that the body can reach and that kernels which cannot be seen may use: they must not move either."""
    unread: frozenset[str] = frozenset()
    """Paths of inputs that no operator got: they are handed on, or not used at all."""
