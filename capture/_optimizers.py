"""Optimizers: settings such as the learning rate are Python values that only the optimizer's own code reads.

A recording freezes them, so those of every optimizer that a body can reach are part of its key. A setting kept in a
tensor is read where it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from capture._named import part_of
from capture._state import Snapshot


class Optimizers:
    """The optimizers that one captured function was seen to reach."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.optim.Optimizer]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, state: Snapshot) -> None:
        """Look for more of them in what a body can reach."""
        known = {id(one()) for one in self._found}
        for _, value in state.entered:
            if isinstance(value, torch.optim.Optimizer) and id(value) not in known:
                self._found.append(weakref.ref(value))

    def part(self) -> tuple[Any, ...]:
        """The key's part: all settings as they are now, without the parameters."""
        return tuple([part_of(value, limit=None) for _, value in self._settings()])

    def labels(self) -> list[str]:
        """Names of the parts."""
        return [name for name, _ in self._settings()]

    def _settings(self) -> Iterable[tuple[str, Any]]:
        for one in self._found:
            optimizer = one()
            if optimizer is None:
                continue
            several = len(optimizer.param_groups) > 1
            for number, group in enumerate(optimizer.param_groups):
                place = f"param_groups[{number}]" if several else type(optimizer).__name__
                yield from ((f"{name} of {place}", value) for name, value in group.items() if name != "params")
