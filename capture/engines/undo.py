"""The former contents of what segments of a recording change outside of the pool, for a call that stops between two of
them."""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from attrs import define, field

MOST_UNDO = 1 << 28
"""Bytes. A body that has written more of the caller's memory before it reads a value is not recorded in segments: the
copies would be made in every replay."""


@define(eq=False)
class Undo:
    """Former contents of storages, and states of generators."""

    _contents: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(factory=dict)
    """By address."""
    _states: list[tuple[torch.Generator, torch.Tensor]] = field(factory=list)

    def keep(self, storages: Iterable[torch.UntypedStorage], generators: Iterable[torch.Generator]) -> None:
        """Keep the contents that are not kept yet. The segments that ran so far have not touched these."""
        for storage in storages:
            if storage.data_ptr() not in self._contents and storage.nbytes():
                self._contents[storage.data_ptr()] = storage, storage.clone()
        known = {id(generator) for generator, _ in self._states}
        self._states += [(one, one.get_state()) for one in generators if id(one) not in known]

    def keep_only(self, addresses: Set[int]) -> None:
        """The storages elsewhere were not written."""
        self._contents = {address: kept for address, kept in self._contents.items() if address in addresses}

    def put_back(self) -> None:
        """Restore everything."""
        for storage, contents in self._contents.values():
            storage.copy_(contents, False)
        for generator, state in self._states:
            generator.set_state(state)
