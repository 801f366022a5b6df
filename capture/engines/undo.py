"""What segments of a recording change outside of the pool, as it was before: for a call that stops between two."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, Protocol

import torch
from attrs import field

from capture.core import config
from capture.core.data import define
from capture.torch_private.capabilities import copy_all

LEAST_UNDO, UNDO_SHARE = 1 << 28, 8
_WORD = 8
_set = torch.Tensor.set_  # torch's own, whatever a watched body finds there


def most_undo(memory_bytes: int) -> int:
    """Bytes that the copies of one recording may take. A body that has written more of the caller's memory before it
    reads a value is not recorded in segments.

    Copies are made in every replay, but the body reads and writes those bytes as well, so that they take a part of its
    time, whatever its size. So what counts is the room: an eighth of what recordings may take (``memory_limit``) of the
    ``memory_bytes`` of the device, and 256 MiB on small ones. They count for ``memory_limit`` as graphs do.
    """
    return max(LEAST_UNDO, int(config.current().memory_of(memory_bytes) / UNDO_SHARE))


class Overlays(Protocol):
    """The part of a pool that copies need."""

    def overlay(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Another storage over the memory of a caller's, which has to outlive it."""


class KeptMemory:
    """Memory for copies of these storages, which are made all at once: one launch on a device for all of a kind, and on
    the CPU no step of Python for each. The storages themselves are not kept alive."""

    def __init__(self, pool: Overlays, storages: Sequence[torch.UntypedStorage]) -> None:
        self.addresses = places_of(storages)
        self._theirs: dict[torch.dtype, list[torch.Tensor]] = {}
        self._ours: dict[torch.dtype, list[torch.Tensor]] = {}
        for storage in storages:
            is_of_words = storage.nbytes() % _WORD == 0 and storage.data_ptr() % _WORD == 0
            dtype = torch.int64 if is_of_words else torch.uint8
            count, device = storage.nbytes() // dtype.itemsize, storage.device
            with torch.inference_mode(False), torch.no_grad():
                theirs = _set(torch.empty(0, dtype=dtype, device=device), pool.overlay(storage), 0, (count,), (1,))
                self._theirs.setdefault(dtype, []).append(theirs)
                self._ours.setdefault(dtype, []).append(torch.empty(count, dtype=dtype, device=device))

    def keep(self) -> None:
        """Copy what the storages hold now."""
        for ours, theirs in self.copies():
            copy_all(ours, theirs)

    def copies(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Where to copy what the storages hold, and from where: all of one dtype at once."""
        return [(ours, self._theirs[dtype]) for dtype, ours in self._ours.items()]

    def put_back(self) -> None:
        """Have them hold that again."""
        for dtype, ours in self._ours.items():
            copy_all(self._theirs[dtype], ours)


Places = tuple[tuple[int, int], ...]
_known: weakref.WeakValueDictionary[tuple[int, Places], Any] = weakref.WeakValueDictionary()
"""Recordings of one pool that write the same memory share what they are kept in: one runs at a time."""


def places_of(storages: Iterable[torch.UntypedStorage]) -> Places:
    """Address and size in bytes of each storage."""
    return tuple([(storage.data_ptr(), storage.nbytes()) for storage in storages])


def kept_memory(
    pool: Overlays, storages: Sequence[torch.UntypedStorage], latest: KeptMemory | None
) -> KeptMemory | None:  # fmt: skip
    """For these storages; ``latest``, what a recording had before, where it still fits. None where there are none."""
    there = [storage for storage in storages if storage.nbytes()]
    places = places_of(there)
    if not there or (latest is not None and latest.addresses == places):
        return latest if there else None
    key = id(pool), places
    kept: KeptMemory | None = _known.get(key)
    if kept is None:
        kept = _known[key] = KeptMemory(pool, there)
    return kept


@define(eq=False)
class Undo:
    """Contents of storages and states of generators."""

    _whole: KeptMemory | None = None
    _contents: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(factory=dict)
    """Storages and copies that were kept one by one, by address."""
    _states: list[tuple[torch.Generator, torch.Tensor]] = field(factory=list)
    _held: list[Any] = field(factory=list)
    """Keeps the storages alive: an island may drop the last other reference to one."""

    @property
    def is_empty(self) -> bool:
        """Whether no memory was kept so far."""
        return self._whole is None and not self._contents

    def keep(
        self, storages: Iterable[torch.UntypedStorage], generators: Iterable[torch.Generator],
        memory: KeptMemory | None = None,
    ) -> None:  # fmt: skip
        """Keep what is not kept yet. Segments that ran so far have not touched it. ``memory``: for these storages,
        which are kept alive."""
        if memory is not None and self.is_empty:
            self._held.append(storages)
            memory.keep()
            self._whole = memory
        else:
            whole = {address for address, _ in self._whole.addresses} if self._whole is not None else set()
            for storage in storages:
                address = storage.data_ptr()
                if address not in self._contents and address not in whole and storage.nbytes():
                    self._contents[address] = storage, storage.clone()
        drawn = {id(generator) for generator, _ in self._states}
        self._states += [(generator, generator.get_state()) for generator in generators if id(generator) not in drawn]

    def take(self, storages: Iterable[torch.UntypedStorage], memory: KeptMemory) -> None:
        """What these storages held is in ``memory`` already."""
        self._held.append(storages)
        self._whole = memory

    def keep_only(self, addresses: Set[int]) -> None:
        """Forget the copies of storages at other addresses: they were not written."""
        self._contents = {address: kept for address, kept in self._contents.items() if address in addresses}

    def put_back(self) -> None:
        """Put everything back, as if nothing of the recording had run."""
        if self._whole is not None:
            with torch.no_grad():
                self._whole.put_back()
        for storage, contents in self._contents.values():
            storage.copy_(contents, False)
        for generator, state in self._states:
            generator.set_state(state)
