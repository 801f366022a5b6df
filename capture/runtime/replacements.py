"""Replacements: objects in Python state that differ in call after call, such as a context that is set before each step.

Told apart by identity, each of them would ask for a recording that is used once. A place in which three new objects in
a row came within a few calls is an input of all calls from then on (``key.input_places``).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import field

from capture.core.data import define
from capture.guards.read import Places
from capture.key.attributes import keeper_of
from capture.key.input_places import InputPlace, is_input, may_be_input, place_at
from capture.state.source import Source

_OFTEN = 3  # objects
_WITHIN = 12  # calls


@define(eq=False)
class _Place:
    place: InputPlace
    known: deque[Any] = field(factory=lambda: deque(maxlen=_OFTEN + 1))
    """The last objects in the place, by weak references where possible: an object that died does not come back."""
    calls: deque[int] = field(factory=lambda: deque(maxlen=_OFTEN))
    """Numbers of the calls that brought new ones."""

    def add(self, value: Any, call: int) -> None:
        """The object that is there now."""
        if not may_be_input(value) or any(_held(one) is value for one in self.known):
            return
        self.known.append(_weakly(value))
        if call not in self.calls:
            self.calls.append(call)

    def is_often(self) -> bool:
        """Whether new objects come in call after call."""
        return len(self.calls) == _OFTEN and self.calls[-1] - self.calls[0] <= _WITHIN


def _weakly(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def _place_of(source: Source) -> InputPlace | None:
    """The place of an attribute, a variable of a closure, or a name in a dict, other than a gradient."""
    holder = source.holder
    is_named = source.kind in ("attribute", "weak", "closure") or (
        source.kind == "item" and type(holder) is dict and type(source.name) is str
    )
    if not is_named or source.name == "grad":
        return None
    return place_at(source.path, holder if source.kind == "weak" else keeper_of(holder), source.name)


def _held(known: Any) -> Any:
    return known() if type(known) is weakref.ref else known


_MOVES = 6  # calls in a row that found another tensor in a place
_MOST_BYTES = 1 << 20  # of such a tensor: beside the work on a larger one the time of a bind is small


@define(eq=False)
class Replacements:
    """The replacements of one captured function."""

    latest: Places = field(factory=Places)
    """Places, with the objects that the last watched run found there."""
    _places: dict[tuple[int, Any], _Place] = field(factory=dict)
    _moved: dict[tuple[int, Any], int] = field(factory=dict)
    """Places of tensors: in how many calls another one was there, of those in a row that found some elsewhere."""

    def moving(self, moves: Iterable[tuple[Source, torch.Tensor]]) -> list[InputPlace]:
        """Places whose tensor is another one in call after call, as a hidden state that the body replaces: inputs from
        now on. ``moves``: the places that have another one now, with it."""
        found = [(place, tensor) for source, tensor in moves if (place := _place_of(source)) is not None]
        self._moved = {place.key(): self._moved.get(place.key(), 0) + 1 for place, _ in found}
        return [
            place for place, tensor in found
            if self._moved[place.key()] >= _MOVES and tensor.untyped_storage().nbytes() <= _MOST_BYTES
        ]  # fmt: skip

    def compare(self, objects: Iterable[tuple[InputPlace, Callable[[], Any]]], call: int) -> None:
        """Count the places that have other objects now than a recording, or a watched run, found there. ``call``: the
        number of this one."""
        for place, held in objects:
            now, value = place.read(), held()
            if now is value or not may_be_input(now):
                continue
            kept = self._places.get(place.key())
            if kept is None:
                kept = self._places[place.key()] = _Place(place)
                if value is not None:
                    kept.known.append(_weakly(value))
            kept.add(now, call)

    def note_new_key(self, call: int) -> None:
        """A call is unlike all before: it may be for what is in those places."""
        self.compare(self.latest.others(), call)
        for one in self._places.values():
            one.add(one.place.read(), call)

    def inputs(self) -> list[InputPlace]:
        """Places that are inputs from now on."""
        often = [(key, one.place) for key, one in self._places.items() if one.is_often()]
        found = [(key, place) for key, place in often if is_input(place.read())]
        for key, _ in found:
            del self._places[key]
        return [place for _, place in found]
