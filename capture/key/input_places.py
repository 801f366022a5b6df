"""Places in Python state that are inputs of every call: a context that is set before each step, a batch that is kept on
an object.

Another object is there in each call, so it is handled as an argument is: opened, its tensors copied or bound, its plain
values part of the key. Where a body runs on other tensors than the caller's, as on a recording's buffers, these are put
into the place meanwhile.
"""

from __future__ import annotations

import contextvars
import itertools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from attrs import evolve
from typing_extensions import override

from capture.core.data import frozen
from capture.key import objects, pytree
from capture.key.attributes import MISSING, item_of, names_of, own_value, plain_class, put_own
from capture.key.signature import Binder
from capture.key.tensor_kind import is_leaf

_CONTAINERS = (tuple, list, dict, OrderedDict, defaultdict)
_MOST_LEAVES = 256
"""Leaves that one object may have. Each is looked at in every call."""


@frozen(eq=False)
class InputPlace:
    """``name`` in the object that ``keeper`` gives, or that object's only value for a cell and a context variable,
    which have no names. ``keeper`` gives None once the object is gone."""

    path: str
    keeper: Callable[[], Any]
    name: Any
    is_attribute: bool = False

    @property
    def parameter(self) -> str:
        """Under which name its value stands among the parameters of a call."""
        return f"<{self.path}>"

    def key(self) -> tuple[int, Any]:
        """Equal for equal places."""
        return id(self.keeper()), self.name

    def is_at(self, holder: Any) -> bool:
        """Whether this is what keeps the value now."""
        keeper = self.keeper()
        return keeper is holder or (keeper is not None and names_of(keeper) is holder)

    def leads_to(self, path: str, *, is_in_argument: bool) -> bool:
        """Whether it is the place with this path, which may be another object's in each call."""
        return False

    def read(self) -> Any:
        """The value that is there now."""
        keeper = self.keeper()
        try:
            if self.is_attribute:
                return own_value(keeper, self.name)
            if type(keeper) is dict:  # most are one of these two
                return dict.get(keeper, self.name, MISSING)
            if type(keeper) is types.CellType:
                return keeper.cell_contents
            if type(keeper) is contextvars.ContextVar:
                return keeper.get(MISSING)
            return item_of(keeper, self.name)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return MISSING

    def read_in(self, values: Sequence[Any]) -> Any:
        """The value that is there in a call with these arguments."""
        return self.read()

    def write_in(self, values: Sequence[Any], value: Any) -> None:
        """Put a value there, for a call with these arguments."""
        self.write(value)

    def write(self, value: Any) -> None:
        """Put a value there. Nobody would see it once the object is gone."""
        keeper = self.keeper()
        if keeper is None:
            return
        if type(keeper) is types.CellType:
            keeper.cell_contents = value
        elif type(keeper) is contextvars.ContextVar:
            keeper.set(value)
        elif self.is_attribute or issubclass(type(keeper), type):
            put_own(keeper, self.name, value)
        else:
            plain_class(keeper).__setitem__(keeper, self.name, value)


def _nobody() -> None:
    """Keeps what belongs to an argument, which is another object in each call."""


@frozen(eq=False)
class PlaceInArgument(InputPlace):
    """A place in one of a call's arguments, which nobody finds without the call. ``at``: the argument's position."""

    at: int = 0

    @override
    def read(self) -> Any:
        return MISSING


@frozen(eq=False)
class GradientPlace(PlaceInArgument):
    """The ``grad`` of an argument, or of a leaf in one: a backward pass in the body adds to it, or leaves one there.
    ``below``: the leaf's path in the argument."""

    below: str = ""

    @classmethod
    def of(cls, path: str, binder: Binder, values: Sequence[Any]) -> GradientPlace | None:
        """That of the leaf with this path in a call; None where the binder's own parameters have no such leaf."""
        count = len(binder.names) - len(binder.places)
        for at, (name, value) in enumerate(zip(binder.names[:count], values, strict=False)):
            begin = "" if name == binder.keywords else name
            for below, leaf in pytree.leaves(value):
                if f"{begin}{below}".removeprefix(".") == path and issubclass(type(leaf), torch.Tensor):
                    return cls(f"{path}.grad", _nobody, "grad", is_attribute=True, at=at, below=below)
        return None

    @override
    def key(self) -> tuple[Any, Any]:
        return self.at, f"{self.below}.grad"

    @override
    def read_in(self, values: Sequence[Any]) -> Any:
        tensor = self._tensor(values)
        return None if tensor is None else tensor.grad

    @override
    def write_in(self, values: Sequence[Any], value: Any) -> None:
        if (tensor := self._tensor(values)) is not None and tensor.grad is not value:
            tensor.grad = value

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor | None:
        """The leaf of a call; None where autograd keeps no gradient for it."""
        value = values[self.at]
        leaf = pytree.leaf_at(value, self.below) if self.below else value
        return leaf if issubclass(type(leaf), torch.Tensor) and leaf.requires_grad and is_leaf(leaf) else None


_NONE: frozenset[str] = frozenset()


def given_gradients(places: Sequence[InputPlace]) -> frozenset[str]:
    """Paths of those that are gradients of arguments."""
    return frozenset([place.path for place in places if issubclass(type(place), GradientPlace)]) if places else _NONE


def place_at(path: str, keeper: Callable[[], Any], name: Any) -> InputPlace:
    """The place of a value that a dict, a cell, or an object itself keeps."""
    held = keeper()
    is_cell = type(held) is types.CellType
    return InputPlace(path, keeper, None if is_cell else name, not is_cell and type(held) is not dict)


def number_place(path: str, keeper: Callable[[], Any], name: Any) -> InputPlace | None:
    """The place of a number; None where none of a dict, a cell, and an object itself keeps it."""
    place = place_at(path, keeper, name)
    return place if type(place.read()) in (float, int) else None


def may_be_input(value: Any) -> bool:
    """Whether the value can be opened as an argument."""
    kind = type(value)
    if kind in pytree.PLAIN_TYPES or issubclass(kind, (torch.Tensor, type, types.FunctionType)):
        return False
    return kind in _CONTAINERS or pytree.is_namedtuple(kind) or pytree.has_fields(kind) or objects.is_plain(kind)


def is_input(value: Any) -> bool:
    """Whether it holds tensors, or plain values alone, and no more than can be looked at in every call. One that holds
    tensors is opened from now on."""
    count = pytree.count_tensors(value)
    objects.may_open(value)
    if count > _MOST_LEAVES or not pytree.is_container(value):
        return False
    leaves = [leaf for _, leaf in itertools.islice(pytree.leaves(value), _MOST_LEAVES + 1)]
    return len(leaves) <= _MOST_LEAVES and (count > 0 or all(type(leaf) in pytree.PLAIN_TYPES for leaf in leaves))


def with_places(binder: Binder, places: Sequence[InputPlace]) -> Binder:
    """Binds a call together with what is in these places."""
    if not places:
        return binder
    bound = _Bound(binder, tuple(places))
    return evolve(
        binder, names=(*binder.names, *[place.parameter for place in places]), values=bound.values, call=bound.call,
        by_position=bound.by_position, places=(*binder.places, *places),
    )  # fmt: skip


@frozen(eq=False)
class _Bound:
    binder: Binder
    places: tuple[InputPlace, ...]

    def values(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The values of the parameters, then those of the places."""
        bound = self.binder.values(*args, **kwargs)
        return (*bound, *[place.read_in(bound) for place in self.places])

    def call(self, function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
        """Call the function while the places hold these values."""
        count = len(values) - len(self.places)
        arguments, place_values = values[:count], values[count:]
        theirs = [
            (place, place.read_in(arguments), value) for place, value in zip(self.places, place_values, strict=True)
        ]
        replaced = [(place, before, value) for place, before, value in theirs if before is not value]
        try:
            for place, _, value in replaced:
                place.write_in(arguments, value)
            return self.binder.call(function, arguments)
        finally:
            _put_back(replaced, arguments)

    def by_position(self, _: tuple[Any, ...]) -> int | None:
        """Always None: calls also differ by the values of places, not by their arguments alone."""
        return None


def _put_back(places: Iterable[tuple[InputPlace, Any, Any]], arguments: Sequence[Any]) -> None:
    """Put the caller's values back into the places. A value that the body itself put there stays."""
    for place, before, given in places:
        if place.read_in(arguments) is given:
            place.write_in(arguments, before)
