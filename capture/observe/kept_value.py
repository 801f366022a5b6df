"""Numbers that the host read and the body keeps in Python state, such as a loss in a list: which effects hold them.

``returned_value`` proves by the code that such a number is only put somewhere. Here the place is looked for among what
the run left there, and whether other code of the run may have looked at it. Each replay puts the number that it reads
there then. If it is not found, or not in one place alone, the read is compared like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, field

from capture.core.data import define, frozen
from capture.key.name_uses import name_uses
from capture.key.packages import is_library, package_of
from capture.observe.computed import in_order, same
from capture.observe.described import KeptEffect, KeptLeaf
from capture.observe.operator_schema import read_text
from capture.observe.returned_value import Kept, as_returned, computed, times_named
from capture.observe.run import ObservedRun
from capture.observe.trace import HandedOut, RunTrace
from capture.state.effects import UsesOfNames, is_only_counted, names_holding, uses_of_names
from capture.state.snapshot import Change
from capture.state.source import Source


@frozen(eq=False)
class _Found:
    """A read that a leaf holds: its number (with the formula, if Python computed something of it), its value, and where
    the body put it."""

    read: int | tuple[int, str]
    value: Any
    place: Kept


@define
class KeptReads:
    """The reads of one run whose numbers the body keeps."""

    watched: ObservedRun
    _uses: UsesOfNames = field(init=False)
    _counted: dict[int, Change] = field(factory=dict)
    """Changes by an amount that may be the read, by ``id`` of their sources."""

    def __attrs_post_init__(self) -> None:
        trace = self.watched.watch.trace
        self._uses = uses_of_names(self.watched.ran) if trace.kept or trace.arrays else UsesOfNames()

    def without_amount(self, change: Change) -> Change:
        """A number to which the body adds one that it reads: another one in each call."""
        is_sum = change.amount is not None and any(
            place.adds and self._is_place(place, change.source)
            for _, places in self.watched.watch.trace.kept.values() for place in places
        )  # fmt: skip
        if not is_sum:
            return change
        self._counted[id(change.source)] = change
        return evolve(change, amount=None)

    def with_unchanged(self, changes: Sequence[Change]) -> list[Change]:
        """All of them, and places that hold the same number as before, in the order in which a run tells changes: that
        is the same in each."""
        return in_order(self.watched, changes, [*self.unchanged()])

    def unchanged(self) -> Iterator[Change]:
        """Places that hold the same number as before the run: by the next call it is another one."""
        changed = {(id(change.source.holder), change.source.name) for change in self.watched.changed}
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
        claims, claimed = dict[int, list[list[KeptLeaf] | None]](), Counter[int]()
        for number, (value, places) in trace.kept.items():
            wanted = as_returned(trace.reads[number], value)
            claims[number] = [self._leaves(place, effects, computed(place.formula, wanted)) for place in places]
            claimed.update(id(leaf) for several in claims[number] for leaf in several or ())
        reads: dict[int, _Found] = {}
        for number, (value, places) in trace.kept.items():
            leaves = [leaf for several in claims[number] for leaf in several or ()]
            if None in claims[number] or any(claimed[id(leaf)] > 1 for leaf in leaves):
                trace.reads[number] = read_text(value)  # whose it is, where two may be there, is not known
                continue
            wanted = as_returned(trace.reads[number], value)
            for place, several in zip(places, claims[number], strict=True):
                kept_read = _Found((number, place.formula) if place.formula else number, wanted, place)
                reads |= dict.fromkeys(map(id, several or ()), kept_read)
        return [self._marked(effect, reads) for effect in effects]

    def unproven_arrays(self, outputs: Sequence[KeptLeaf], effects: Sequence[KeptEffect]) -> Iterator[HandedOut]:
        """Arrays that are neither in the result, nor where the body was seen to keep them, or that other code may look
        at there."""
        for array in self.watched.watch.trace.arrays.values():
            kept = [self._has_array(array, place, effects) for place in array.keepers]
            is_borrowed = self.watched.call.annotation.outputs == "borrow"  # an array cannot be told that it is over
            is_placed = (bool(kept) and not array.computed) or array.is_placed(outputs)
            if is_borrowed or not (is_placed and all(kept)):
                yield array

    def _has_array(self, array: HandedOut, place: Kept, effects: Sequence[KeptEffect]) -> bool:
        for effect in effects:
            if self._is_at(place, effect.change):
                return sum(leaf.value is array.tensor for leaf in effect.leaves) == place.count
        return False

    def _marked(self, effect: KeptEffect, reads: Mapping[int, _Found]) -> KeptEffect:
        if reads.keys().isdisjoint(map(id, effect.leaves)):
            counted = self._counted.get(id(effect.change.source))
            return effect if counted is None else KeptEffect(counted, ())
        adds = any(
            kept_read.place.adds for kept_read in (reads[id(leaf)] for leaf in effect.leaves if id(leaf) in reads)
        )
        was = self._counted.get(id(effect.change.source), effect.change)
        change, changed = evolve(effect.change, is_read_anew=True, adds_read=adds), self.watched.changed
        is_there = any(change_so_far is was for change_so_far in changed)
        changed[:] = [change if change_so_far is was else change_so_far for change_so_far in changed] + [change] * (
            not is_there
        )
        return KeptEffect(change, tuple(_with_read(leaf, reads.get(id(leaf))) for leaf in effect.leaves))

    def _leaves(self, place: Kept, effects: Sequence[KeptEffect], value: Any) -> list[KeptLeaf] | None:
        """The leaves that hold it there. None if others do, or code of the run may look at what is there."""
        for effect in effects:
            if self._is_at(place, effect.change):
                if place.adds:
                    before = effect.change.before
                    if type(before) not in (int, float):
                        return None
                    value = before + value
                leaves = [leaf for leaf in effect.leaves if leaf.kind == "python" and same(leaf.value, value)]
                return leaves if len(leaves) == place.count else None
        return None

    def _is_at(self, place: Kept, change: Change) -> bool:
        if place.kind == "append":
            members = change.members
            return members is not None and members.is_free and members.container is place.holder
        source = change.source
        if change.container or not self._is_place(place, source) or self._uses.is_computed or self._is_set_anew(place):
            return False
        if place.adds:
            return is_only_counted(self.watched.before, source, self._uses)
        return not self._is_read(place)

    def _is_set_anew(self, place: Kept) -> bool:
        """Whether other code of the run puts something there, or elsewhere under this name: it may be another value
        that is left, which was equal in this run."""
        trace = self.watched.watch.trace
        all_places = [
            *[places for _, places in trace.kept.values()],
            *[array.keepers for array in trace.arrays.values()],
        ]
        known = {one.by for places in all_places for one in places}
        calls = {one for places in all_places for place in places for one in place.via}
        called_by = {name for name, _, _ in place.via}
        holders = names_holding(self.watched.before, place.holder) if place.kind == "item" else ()
        packages = {package_of(one.__module__) for one in type(place.holder).__mro__}
        for code, scopes in self.watched.ran.codes.items():
            stores = [at for kind, name, at in name_uses(code).stores if self._may_be(place, kind, name, holders)]
            tracked = [at for called, caller, at in calls if caller is code and called in called_by]
            named = sum(times_named(code, name, is_attribute=of_object) for name, of_object in called_by)
            if all((code, at) in known for at in stores) and named == len(tracked):
                continue
            owners = {package_of(scope.get("__name__")) for scope in scopes}
            if not all(map(is_library, owners)) or not packages.isdisjoint(owners):
                return True
        return False

    @staticmethod
    def _may_be(place: Kept, kind: str, name: Any, holders: Sequence[Any]) -> bool:
        """Whether what is stored so (``NameUses.stores``) may be this place. ``holders``: names of what it is in."""
        if kind == "any":
            return name in holders
        return kind == place.kind and type(name) is type(place.name) and bool(name == place.name)

    @staticmethod
    def _is_place(place: Kept, source: Source) -> bool:
        return source.kind == place.kind and source.name == place.name and source.holder is place.holder

    def _is_read(self, place: Kept) -> bool:
        if place.kind == "attribute":
            packages: Iterable[str] = [package_of(one.__module__) for one in type(place.holder).__mro__]
            return self._uses.is_read(place.name, packages)
        names = names_holding(self.watched.before, place.holder)
        return not names or any(
            self._uses.is_read_whole((name, place.name)) or self._uses.may_ask(name, place.holder) for name in names
        )


def _with_read(leaf: KeptLeaf, found: _Found | None) -> KeptLeaf:
    """The leaf of a sum is what is added."""
    if found is None:
        return evolve(leaf, read=None)
    value = computed(found.place.formula, found.value) if found.place.adds else leaf.value
    return evolve(leaf, read=found.read, value=value)


def is_value_of(trace: RunTrace, number: int, formula: str, value: Any) -> bool:
    """Whether the body returned this, which it computed of the value that it read."""
    read = as_returned(trace.reads[number], trace.kept[number][0])
    return same(computed(formula, read), value)
