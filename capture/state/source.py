"""Places: where Python objects keep values, and all places of a module at once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from attrs import define

from capture._fast import native, seen
from capture._named import MISSING

PlaceKind = Literal["argument", "attribute", "parameter", "buffer", "module", "item", "closure", "global", "root"]
MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}


@seen
@define(eq=False)
class Place:
    """Where a value is kept: ``holder`` plus ``name``. ``parent`` leads back to the root.

    Never changed. Not frozen, since one is made for every attribute a walk meets, and freezing doubles the cost.
    """

    kind: PlaceKind
    holder: Any
    name: Any
    path: str
    parent: Place | None = None

    def get(self) -> Any:
        """The value kept now, or ``MISSING``."""
        try:
            if self.kind == "root":
                return self.holder
            if self.kind == "closure":
                return self.holder.cell_contents
            if self.kind == "attribute":
                own = getattr(self.holder, "__dict__", None)
                if own is not None and self.name in own:
                    return own[self.name]
                return getattr(self.holder, self.name)
            return self.holder[self.name]
        except (AttributeError, KeyError, IndexError, ValueError):
            return MISSING

    def set(self, value: Any) -> None:
        """Keep another value here, as the body's own assignment would."""
        if self.kind == "closure":
            self.holder.cell_contents = value
        elif self.kind == "attribute":
            own = getattr(self.holder, "__dict__", None)
            if own is not None and self.name in own:
                own[self.name] = value
            else:
                object.__setattr__(self.holder, self.name, value)
        elif self.kind != "root":
            self.holder[self.name] = value

    def remove(self) -> None:
        """Undo an assignment to a place that did not exist."""
        if self.kind == "attribute":
            self.holder.__dict__.pop(self.name, None)
        elif isinstance(self.holder, dict):
            self.holder.pop(self.name, None)

    def among(self, value: Any) -> Place:
        """The same step below another object: ``value`` takes the place of the object this place is in."""
        if isinstance(value, torch.nn.Module) and self.kind in ("parameter", "buffer", "module"):
            tables = {"parameter": value._parameters, "buffer": value._buffers, "module": value._modules}
            return Place(self.kind, tables[self.kind], self.name, self.path)
        return Place(self.kind, value, self.name, self.path)

    def chain(self) -> Iterator[Place]:
        """This place and all above it."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent


Found = tuple[Place, Any]
"""A place and what it holds."""
Table = tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]
"""A dict, and the keys and the very objects it held."""
Tables = tuple[Table, ...]


def _table(now: dict[str, Any]) -> Table:
    return now, tuple(now), tuple(now.values())


def _are_as_they_were(tables: Tables) -> bool:
    return all(tuple(now) == keys and all(map(operator.is_, now.values(), values)) for now, keys, values in tables)


are_as_they_were: Callable[[Tables], bool] = _are_as_they_were if native is None else native.are_as_they_were
"""The same members, in the same order."""


def _members_of_module(module: torch.nn.Module, place: Place) -> tuple[list[Found], Tables]:
    """Members with their places, and the dicts behind the module."""
    tables = (module.__dict__, module._parameters, module._buffers, module._modules)
    return own_places(module, place), tuple([_table(table) for table in tables])


members_of_module = _members_of_module if native is None else functools.partial(
    native.members_of_module, internals=MODULE_INTERNALS
)  # fmt: skip


def own_places(module: torch.nn.Module, place: Place) -> list[Found]:
    """Parameters, buffers, submodules and attributes of a module."""
    found: list[Found] = []
    path = place.path
    tables: tuple[tuple[PlaceKind, dict[str, Any]], ...] = (
        ("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules)
    )  # fmt: skip
    for kind, table in tables:
        found += [(Place(kind, table, name, _join(path, name), place), table[name]) for name in table]
    own = module.__dict__
    found += [
        (Place("attribute", module, name, f"{path}.{name}", place), own[name])
        for name in own if name not in MODULE_INTERNALS
    ]  # fmt: skip
    return found


def _join(path: str, name: str) -> str:
    return f"{path}[{name}]" if name.isdigit() else f"{path}.{name}"
