"""Numbers that the host read and the body keeps in Python state, such as a loss in a list: which effects hold them.

``returned_value`` proves by the code that such a number is only put somewhere. Here the place is looked for among what
the run left there, and whether other code of the run may have looked at it. Each replay puts the number that it reads
there then. If it is not found, or not in one place alone, the read is compared like any other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field

from capture.key.packages import package_of
from capture.observe.described import KeptEffect, KeptLeaf
from capture.observe.operator_schema import read_text
from capture.observe.returned_value import Kept, as_returned
from capture.observe.run import ObservedRun
from capture.state.effects import UsesOfNames, names_holding, uses_of_names
from capture.state.snapshot import Change


@define
class KeptReads:
    """Those of one run."""

    watched: ObservedRun
    _uses: UsesOfNames = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._uses = uses_of_names(self.watched.ran) if self.watched.watch.trace.kept else UsesOfNames()

    def unchanged(self) -> Iterator[Change]:
        """Places that hold the same number as before the run: by the next call it is another one."""
        changed = {(id(one.source.holder), one.source.name) for one in self.watched.changed}
        for _, places in self.watched.watch.trace.kept.values():
            for place in places:
                if place.kind == "append" or (id(place.holder), place.name) in changed:
                    continue
                for source, value in self.watched.before.sources.values():
                    if source.holder is place.holder and source.name == place.name:
                        yield Change(source, value, value)
                        break

    def marked(self, effects: Sequence[KeptEffect]) -> list[KeptEffect]:
        """The effects, with the leaves that hold such a number marked by that of the read. Reads whose number is not
        found are compared."""
        trace = self.watched.watch.trace
        reads: dict[int, int] = {}
        for number, (value, places) in trace.kept.items():
            wanted = as_returned(trace.reads[number], value)
            found = [self._leaves(place, effects, wanted) for place in places]
            leaves = [id(leaf) for several in found for leaf in several or ()]
            if None in found or len(set(leaves)) < len(leaves) or not reads.keys().isdisjoint(leaves):
                trace.reads[number] = read_text(value)
            else:
                reads |= dict.fromkeys(leaves, number)
        return [self._marked(one, reads) for one in effects] if reads else list(effects)

    def _marked(self, effect: KeptEffect, reads: Mapping[int, int]) -> KeptEffect:
        if reads.keys().isdisjoint(map(id, effect.leaves)):
            return effect
        change, changed = evolve(effect.change, is_read_anew=True), self.watched.changed
        was = any(one is effect.change for one in changed)
        changed[:] = [change if one is effect.change else one for one in changed] + [change] * (not was)
        return KeptEffect(change, tuple(evolve(leaf, read=reads.get(id(leaf))) for leaf in effect.leaves))

    def _leaves(self, place: Kept, effects: Sequence[KeptEffect], value: Any) -> list[KeptLeaf] | None:
        """The leaves that hold it there. None if others do, or code of the run may look at what is there."""
        for effect in effects:
            if self._is_at(place, effect.change):
                leaves = [leaf for leaf in effect.leaves if leaf.kind == "python" and _same(leaf.value, value)]
                return leaves if len(leaves) == place.count else None
        return None

    def _is_at(self, place: Kept, change: Change) -> bool:
        if place.kind == "append":
            members = change.members
            return members is not None and members.is_free and members.container is place.holder
        source = change.source
        if change.container or source.kind != place.kind or source.name != place.name or self._uses.is_computed:
            return False
        return source.holder is place.holder and not self._is_read(place)

    def _is_read(self, place: Kept) -> bool:
        if place.kind == "attribute":
            packages: Iterable[str] = [package_of(one.__module__) for one in type(place.holder).__mro__]
            return self._uses.is_read(place.name, packages)
        names = names_holding(self.watched.before, place.holder)
        return not names or any(
            self._uses.is_read(name, ()) or self._uses.is_read((name, place.name), ()) for name in names
        )


def _same(one: Any, other: Any) -> bool:
    """Two numbers are of one type, and equal bit for bit."""
    if type(one) is not type(other):
        return False
    return struct.pack("d", one) == struct.pack("d", other) if type(one) is float else bool(one == other)
