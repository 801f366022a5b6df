"""The number of the next hook (``RemovableHandle.next_id``). torch counts it up for each hook in the process and uses
it as a key of tables of hooks alone: a body that puts hooks on modules and takes them away again does the same with any
number. Where torch has no such attribute nothing is left out of guards."""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle

_COUNTER = "next_id"


def counters_of(kind: type) -> frozenset[str]:
    """Attributes of a class that number hooks."""
    return frozenset({_COUNTER}) if kind is RemovableHandle and _COUNTER in vars(kind) else frozenset()
