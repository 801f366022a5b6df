"""One object stands for all sets that are equal, as long as one of them is kept."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from typing_extensions import override

from capture import capture
from capture.core.interned import interned
from capture.guards.recording_guard import RecordingGuard


def test_equal_sets_are_one_object_while_it_is_kept() -> None:
    first = interned(frozenset({"a", "b", "c"}))
    assert interned(frozenset({"c", "b", "a"})) is first
    assert interned(frozenset({"a", "b"})) == {"a", "b"}
    watch = weakref.ref(first)
    del first
    assert watch() is None
    assert interned(frozenset({"a", "b", "c"})) == {"a", "b", "c"}


def test_recordings_share_what_their_guards_name() -> None:
    """A server with hundreds of shapes keeps the names that its code may look up in a class once."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(3)

        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    blocks = [capture(Block(), max_recordings=8) for _ in range(3)]
    for block in blocks:
        for size in range(1, 5):
            for _ in range(4):
                block(torch.ones(size, 3))
    guards = [found for found in gc.get_objects() if type(found) is RecordingGuard]
    sets = [
        guard.expected[0]
        for found in guards
        for guard in found.structure
        if guard.kind == "names" and guard.source.holder is Block
    ]
    assert len(sets) >= len(blocks)
    assert len({id(names) for names in sets}) == len(set(sets))
