"""Memory of the pool that stays as it is because somebody still uses it.

The memory of a live output is never moved, as NumPy, DLPack or C code may have its address. An output that is still
used when its step is over is **pinned**: it keeps its block until its storage dies. A recording that writes there may
not run meanwhile (``Recording.avoid``); where the pin is its own output, that output is **owned** from then on: fresh
memory in every call, so that it stands in the way of no recording again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from capture.core.data import frozen
from capture.engines.base import Block
from capture.tree.liveness import StorageWatch, hold, make_stale
from capture.tree.node import Node
from capture.tree.outputs import OutputPlan

OutputGroup = tuple[Node, int]
"""A node and the number of a group of its outputs."""


@frozen(eq=False)
class Pin:
    """A block that a storage in use keeps."""

    block: Block
    held: StorageWatch
    made_by: weakref.ref[Node] | None = None
    """The node whose output it is."""
    number: int = 0
    rests: bool = False
    """A gradient that the next run of its recording replaces: until then it is as any other."""

    @property
    def node(self) -> Node | None:
        """The node, if it is alive."""
        return None if self.made_by is None else self.made_by()

    @property
    def is_used(self) -> bool:
        """Whether the storage is alive."""
        return self.held() is not None


def pins_of(groups: Iterable[OutputGroup], *, rests: bool = False) -> list[Pin]:
    """Pins for the outputs of these groups that are in use. The node goes on watching them until ``leave``."""
    pins = []
    for node, number in groups:
        outputs = _outputs_of(node)
        held = outputs.live[number]
        storage = held() if held is not None else None
        block = outputs.groups[number].block
        if storage is not None and storage.data_ptr() == block.address:  # else its holder gave it other memory
            pins.append(Pin(block, hold(storage), weakref.ref(node), number, rests))
    return pins


def leave(groups: Iterable[OutputGroup]) -> None:
    """Leave the outputs of these groups to their holders."""
    for node, number in groups:
        _outputs_of(node).lose(number)


def invalidate(node: Node, number: int) -> bool:
    """Make borrowed outputs raise. False if a view of one is held: a view cannot raise, so it keeps its values."""
    outputs = _outputs_of(node)
    tensors = [tensor for reference in outputs.tensors[number] if (tensor := reference()) is not None]
    alone = len(tensors) == 1 and type(tensors[0]) is torch.Tensor
    alone = alone and outputs.is_sole_holder(number, tensors[0])
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            make_stale(tensor, node.function.annotation)
    if alone:
        outputs.lose(number)
    return alone


def _outputs_of(node: Node) -> OutputPlan:
    assert node.outputs is not None
    return node.outputs
