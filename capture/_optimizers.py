"""Optimizers: settings such as the learning rate are Python values that only the optimizer's own code reads.

A recording freezes them, so those of every optimizer that a body can reach are part of its key. A setting kept in a
tensor is read where it lives.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from capture._named import part_of
from capture._state import Snapshot


class Optimizers:
    """The optimizers that one captured function was seen to reach."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.optim.Optimizer]] = []
        self.has_looked = False
        """Python state was searched for them."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, state: Snapshot) -> None:
        """Look for more of them in what a body can reach."""
        self.has_looked = True
        for _, value in state.entered:
            if isinstance(value, torch.optim.Optimizer):
                self._add(value)

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        if all(one() is not optimizer for one in self._found):
            self._found.append(weakref.ref(optimizer))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Those that take a step inside the block are found, however hidden they are."""
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._add(optimizer))
        try:
            yield
        finally:
            hook.remove()

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
