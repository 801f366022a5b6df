"""At which addresses one recorded graph reads and writes its tensors, and how to change that.

The table is learned from a second capture (``calibrate``) and kept with the recording, never in the plan. Each node's
block of parameters is kept, so that another address costs one word written and one call of the driver a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from capture.core.data import define
from capture.engines.cuda import kernel_params
from capture.engines.cuda.address_inference import AddressWord
from capture.engines.cuda.kernel_params import GraphNode, ParameterWriter

ALIGNMENT = 256
"""A new address equals the recorded one modulo this: kernels and their tensor maps may rely on it, at most to 128."""


@define(eq=False)
class _Slot:
    """A node with words that move. ``at``: the addresses, one a path, that it was given last."""

    node: GraphNode
    words: list[AddressWord]
    paths: tuple[str, ...] = ()
    at: tuple[int, ...] | None = None
    _editor: ParameterWriter | None = None
    _parts: tuple[tuple[int, int], ...] = ()

    def set(self, executable: Any, at: tuple[int, ...]) -> bool:
        """Give the node its tensors at these addresses. False if the driver refuses."""
        if self._editor is None:
            self._editor = self.node.editor([word.index for word in self.words])
            self._parts = tuple((self.paths.index(word.path), word.offset) for word in self.words)
        return self._editor.set(executable, [at[number] + offset for number, offset in self._parts])


class AddressTable:
    """The bindings of one recording."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, added: frozenset[int] = frozenset(),
        nodes: Sequence[GraphNode] | None = None,
    ) -> None:  # fmt: skip
        """``nodes``: those of the graph, if something else sets parameters of them, too."""
        self.nodes = kernel_params.read_captured(graph, added) if nodes is None else nodes
        self.begins: dict[str, int] = {}
        """Where each tensor began when the graph was recorded."""
        self._executable = kernel_params.executable_of(graph)
        self._slots: dict[int, _Slot] = {}
        self._by_path: dict[str, list[_Slot]] = {}
        self._at: dict[str, int] = {}
        self._alone: set[str] = set()

    def learn(self, words: Sequence[AddressWord]) -> None:
        """Trust these words for all of their paths."""
        learned = {word.path for word in words}
        kept = [word for slot in self._slots.values() for word in slot.words if word.path not in learned]
        self._alone -= learned
        self._slots, self._by_path = {}, {path: [] for path in self._alone}
        for word in (*kept, *words):
            slot = self._slots.setdefault(word.node, _Slot(self.nodes[word.node], []))
            slot.words.append(word)
        for slot in self._slots.values():
            slot.paths = tuple(dict.fromkeys(word.path for word in slot.words))
            for path in slot.paths:
                self._by_path.setdefault(path, []).append(slot)
        for path in self._by_path:
            self._at.setdefault(path, self.begins[path])

    def leave_alone(self, paths: Iterable[str]) -> None:
        """Trust that nothing in the graph reads these tensors."""
        for path in paths:
            self._by_path[path], self._at[path] = [], self.begins[path]
            self._alone.add(path)

    def bind(self, addresses: Mapping[str, int]) -> bool:
        """Have the graph read these tensors at these addresses from its next launch on.

        False if a tensor is not known, or its address is aligned otherwise: nothing has changed then. Raises
        ``DriverError`` if the driver refuses: the graph must not be launched any more then.
        """
        by_path, at, begins = self._by_path, self._at, self.begins
        for path, address in addresses.items():
            if path not in by_path or (address - begins[path]) % ALIGNMENT:
                return False
        at.update(addresses)
        slots = {id(slot): slot for path in addresses for slot in by_path[path]}
        for slot in slots.values():
            wanted = tuple([at[path] for path in slot.paths])
            if wanted != slot.at:
                slot.at = None
                if not slot.set(self._executable, wanted):
                    raise kernel_params.DriverError(f"the driver takes no other parameters for {slot.node.name()}")
                slot.at = wanted
        return True

    def knows(self, paths: Iterable[str]) -> bool:
        """Whether all these tensors have words that are trusted."""
        return all(path in self._by_path for path in paths)

    def kernels(self, paths: Iterable[str]) -> list[str]:
        """Names of what reads or writes these tensors."""
        slots: dict[int, Any] = {id(slot): slot for path in paths for slot in self._by_path.get(path, ())}
        return list(dict.fromkeys(slot.node.name() for slot in slots.values()))
