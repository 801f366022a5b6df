"""How a recording's results and effects are built again after each replay.

``fresh`` leaves lie in blocks of the pool and become new tensors on new storages, so that liveness can be seen.
Inputs and static tensors are handed back as the caller's own, views of them are views of the caller's own.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.core.options import Outputs
from capture.engines.base import Block, Geometry, OwnedOutput, Pool, Recording, on_storage
from capture.key.tensor_kind import Kind
from capture.native import native
from capture.observe.returned_value import AsReturned, computed
from capture.state.snapshot import Change
from capture.state.source import Reference
from capture.torch_private import capabilities
from capture.torch_private.tensor_reads import counts_holders
from capture.tree.liveness import (
    LONE_GRADIENT,
    SharedStorage,
    StorageWatch,
    are_untouched_gradients,
    hold,
    is_sole_holder,
    only_gradients,
)
from capture.tree.output_structure import DONE, Begun, EffectSlot, OwnContainer, fill

_NOTHING_READ: Mapping[int, Any] = {}


@frozen(eq=False)
class ReadInLine:
    """What the host reads in a replay that goes on without it, and what the body makes of that at once."""

    values: list[Any]
    """Where each replay leaves them, by the number of the read."""
    kinds: tuple[Callable[[Any], Any] | None, ...]
    formulas: tuple[Any, ...] = ()
    """What Python computes of the values that are read, besides."""

    def taken(self) -> Mapping[Any, Any]:
        """Those of the last replay."""
        pairs = enumerate(zip(self.values, self.kinds, strict=True))
        found = AsReturned({number: value if kind is None else kind(value) for number, (value, kind) in pairs})
        if self.formulas:
            numbers = {("read", number): value for number, value in enumerate(self.values)}
            found.update((formula, formula.value(numbers)) for formula in self.formulas)
        return found

    def way_of(self, which: Any) -> tuple[int, Callable[[Any], Any] | None]:
        """The number of the read of a value that the body returns, and the function that it goes through."""
        if type(which) is int:
            return which, self.kinds[which]
        if which in self.formulas:
            ((_, number),) = which.origins()
            return number, lambda value: which.value({("read", number): value})
        number, formula = which
        kind, compute = self.kinds[number], functools.partial(computed, formula)
        return number, compute if kind is None else lambda value: compute(kind(value))


@frozen(eq=False)
class Alias:
    """A tensor on the memory of another one: ``shift`` bytes from that one's first element."""

    source: int | str
    same: bool
    dtype: torch.dtype = torch.float32
    shift: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    conj: bool = False
    """Torch's lazy conjugation bit, whatever that of the other tensor is."""

    def build(self, tensor: torch.Tensor) -> torch.Tensor:
        """The alias of this call's tensor. It is part of no graph: with one, it would be no recording's."""
        if self.same:
            return tensor
        is_apart = tensor.requires_grad and torch.is_grad_enabled()
        return self._on(tensor.detach() if is_apart else tensor)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = int(tensor.storage_offset()) * tensor.element_size() + self.shift
        offset = begin // self.dtype.itemsize
        if self.dtype == tensor.dtype:
            view = tensor.as_strided(self.shape, self.stride, offset)
        else:
            empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
            view = empty.set_(tensor.untyped_storage(), offset, self.shape, self.stride)
        return view if view.is_conj() == self.conj else view.conj()


@frozen(eq=False)
class OutputGroup:
    """Fresh leaves that share one block, and their positions among all leaves."""

    block: Block
    positions: tuple[int, ...]
    geometries: tuple[Geometry, ...]
    paths: tuple[str, ...] = ()
    """Paths of its leaves, for messages."""


@define(eq=False)
class OutputPlan:
    """Builds all leaves of one recording. ``live`` watches the storages handed out last, one a group."""

    policy: Outputs
    preserving: bool
    """Outputs are never invalidated, so that the tensor objects need not be known."""
    count: int
    skeleton: Any
    groups: tuple[OutputGroup, ...]
    aliases: tuple[tuple[int, Alias], ...]
    kinds: tuple[tuple[int, Kind], ...]
    """By position, the leaves made by the body that are more than plain tensors."""
    constants: tuple[tuple[int, Any], ...]
    reads: tuple[tuple[int, Any], ...]
    """By position, the number of the read whose value each call has there, and how it follows from that."""
    empties: tuple[tuple[int, Geometry, torch.device], ...]
    repeats: tuple[tuple[int, int], ...]
    """Positions that hold the very object of an earlier position."""
    effects: tuple[EffectSlot, ...]
    inference: bool
    """Fresh leaves are inference tensors although the caller is not in inference mode, as the body entered it."""
    live: list[StorageWatch | None] = field(factory=list)
    tensors: list[list[weakref.ref[torch.Tensor]]] = field(factory=list)
    """The tensor objects handed out, by group: needed to invalidate them."""
    shared_storages: tuple[SharedStorage | None, ...] = ()
    """For each group that is one tensor and is not owned: what hands out its tensors."""
    owned: frozenset[int] = frozenset()
    """Groups that have fresh memory in every call."""
    places: list[Any] = field(factory=list)
    """Where replays leave the tensors of owned groups, one place a group."""
    sources: tuple[Any, ...] = ()
    """For the C module: for each group, a ``SharedStorage``, or the list of places and the number in it."""
    single: Any = None
    """The source of a plan with one output and nothing else."""
    gradients: dict[int, Reference] = field(factory=dict)
    """Groups that become the ``grad`` of a tensor, which the body does not read."""
    shared: dict[int, tuple[Reference, ...]] = field(factory=dict)
    """Groups that hold such gradients of several tensors, or one that is put together as that of a ``DTensor`` is."""
    replaced: dict[int, Reference] = field(factory=dict)
    """The tensors of ``gradients`` and ``shared``, by ``id``."""
    deposits: Callable[[Sequence[int]], Sequence[torch.Tensor]] | None = None
    """Gives the tensors whose ``grad`` the caller sets from the leaves at these positions, or nothing."""
    slots: dict[int, EffectSlot] = field(factory=dict)
    """The effects that set these gradients, by group."""
    others: tuple[tuple[int, ...], tuple[EffectSlot, ...]] = ((), ())
    """All other groups, and all other effects."""
    fresh: Callable[..., bool] | None = None
    """Compares metadata with that of such gradients when they were made."""
    numbers: tuple[int, ...] = ()
    """Numbers of all groups."""
    first_positions: tuple[int, ...] = ()
    """The first position of each group."""
    untouched: Any = None
    """For the C module: the gradients of the last replay, once they were found unchanged; None after new ones are
    made."""
    fills: Callable[[Sequence[Any]], Any] | None = None
    """``fill`` for a structure of tuples and lists."""
    own: dict[int, tuple[Any, str]] = field(factory=dict)
    """In the call that records, whose body has put others into their places by now: the caller's own containers that it
    handed back, as in ``Structures``. Empty in every replay."""
    in_line: ReadInLine | None = None
    """The reads of a recording that goes on without them."""
    collect: Callable[[], None] | None = None
    """Makes the owned outputs, for an engine whose replays do not."""

    def __attrs_post_init__(self) -> None:
        self.sources = self.shared_storages
        self.places = [None] * len(self.groups)

    def make_owned(self, numbers: Iterable[int], recording: Recording) -> None:
        """Give these groups fresh memory in every call from now on."""
        self.owned |= frozenset(numbers)
        for number in self.owned:
            self.lose(number)
        self.shared_storages = tuple(
            None if number in self.owned else group for number, group in enumerate(self.shared_storages)
        )
        groups = [(number, self.groups[number]) for number in sorted(self.owned)]
        self.collect = recording.make_owned(
            [OwnedOutput(group.block, group.geometries, self.places, number) for number, group in groups]
        )
        self.sources = tuple(  # C hands a tensor out as it stands; an inference tensor has to be made of it
            (self.places, number) if number in self.owned and not self.inference else group
            for number, group in enumerate(self.shared_storages)
        )
        self.single = self.sources[0] if self.single is not None else None
        groups_left, effects = self.others
        taken = sorted(self.owned & set(self.gradients))
        new = [number for number in taken if number not in groups_left]  # or else this was stopped below
        self.others = (*groups_left, *new), (*effects, *[self.slots[number] for number in new])
        for number in taken:
            del self.gradients[number]
        self.fresh = None

    def build_single(self) -> torch.Tensor:
        """The result of a replay, for a plan with one fresh tensor and nothing else."""
        values: list[Any] = [None]
        tensors = None if self.preserving else self.tensors
        left = native.hand_out(self.sources, self.live, (0,), values, (0,), tensors)
        if left:
            self.build_left(None, values, left)
        result: torch.Tensor = values[0]
        return result

    def several(self) -> tuple[Any, ...] | None:
        """For the C module: how results are built that have only fresh tensors, aliases, constants and repeats."""
        others = self.inference or self.kinds or self.empties or self.effects
        reads = self._reads_in_c()
        if others or self.fills is None or reads is None:
            return None
        return (
            self.sources,
            self.first_positions,
            self.numbers,
            self.constants,
            self.repeats,
            self.fills,
            self.count,
            tuple([(at, alias.source, None if alias.same else alias) for at, alias in self.aliases]),
            reads,
        )

    def _reads_in_c(self) -> tuple[Any, ...] | None:
        """For the C module: the list of what is read, then for each place in the result its position, that of the value
        in the list, and a function that it goes through, or None. None where it runs segment by segment."""
        if not self.reads or self.in_line is None:
            return None if self.reads else ()
        if any(len(formula.origins()) != 1 for formula in self.in_line.formulas):
            return None
        return self.in_line.values, tuple([(at, *self.in_line.way_of(which)) for at, which in self.reads])

    def is_sole_holder(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether nobody but this tensor, which was handed out, uses its group's memory."""
        return is_sole_holder(tensor, self._holders(number))

    def gradients_of(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors whose ``grad`` alone uses this group, and which of them lie here. Empty if anything else uses
        it."""
        alone = self.gradients.get(number)
        references = self.shared.get(number, ()) if alone is None else (alone,)
        held = self.live[number]
        parameters = [parameter for reference in references if (parameter := reference()) is not None]
        if self.deposits is not None:
            parameters += self.deposits(self.groups[number].positions)
        storage = held() if held is not None else None
        if not parameters or storage is None or len(parameters) < len(references):
            return [], []
        gradients = only_gradients(parameters, storage, self._holders(number))
        return ([], []) if gradients is None else (parameters, gradients)

    def leave_out_gradients(self, read: Container[int]) -> None:
        """The body reads the gradients that these tensors, by ``id``, have before it replaces them."""
        left_out = [number for number, of in self.gradients.items() if id(of()) in read]
        groups, effects = self.others
        self.others = (*groups, *left_out), (*effects, *[self.slots[number] for number in left_out])
        self.gradients = {number: of for number, of in self.gradients.items() if number not in left_out}
        self.shared = {
            number: several for number, several in self.shared.items() if not any(id(of()) in read for of in several)
        }

    def keeps_gradients(self) -> bool:
        """Whether all that became gradients in the last replay still are, as they were made, and nobody else uses
        them."""
        parameters = tuple([of() for of in self.gradients.values()])
        if self.untouched is not None and self.untouched(parameters):
            return True
        self.untouched = None
        shared_storages = [shared for number in self.gradients if (shared := self.shared_storages[number]) is not None]
        watched = [self.live[number] for number in self.gradients]
        if len(shared_storages) != len(watched) or not all(
            map(operator.is_, [shared_storage.held for shared_storage in shared_storages], watched)
        ):
            return False
        if self.fresh is None:
            firsts = [shared.first for shared in shared_storages if shared.first is not None]
            if len(firsts) < len(shared_storages) or not capabilities.HAS_METADATA_GUARD:
                return False
            self.fresh = capabilities.metadata_guard(firsts)
        untouched = are_untouched_gradients(parameters, shared_storages, self.fresh)
        if untouched and counts_holders():
            watches = tuple([shared.held for shared in shared_storages])
            self.untouched = native.Untouched(parameters, watches, capabilities.raw_use_count, LONE_GRADIENT)
        return untouched

    def keep_apart(self) -> None:
        """Who gets inner tensors keeps them apart from now on."""
        for shared in self.shared_storages:
            if shared is not None:
                shared.keep_apart()

    def lose(self, number: int) -> None:
        """What was handed out of this group has left the pool, or must not be used any more."""
        self.live[number], self.untouched = None, None
        shared = self.shared_storages[number]
        if shared is not None:
            shared.forget()

    def _holders(self, number: int) -> int:
        shared = self.shared_storages[number]
        known = shared.alone if shared is not None and self.live[number] is shared.held else 1
        return max(known, 1)

    def build(
        self,
        pool: Pool,
        leaves: Sequence[Any],
        statics: Callable[[str], torch.Tensor],
        named_values: Callable[[], dict[str, Any]],
        *,
        in_place: bool = False,
        values: list[Any] | None = None,
        again: bool = False,
        begun: Begun | None = None,
        read: Mapping[Any, Any] = _NOTHING_READ,
    ) -> Any:
        """Result of a replay: builds every leaf, sets effects, and starts watching what is handed out. ``in_place``:
        the gradients of the last replay are still in place, nobody else has them, and this one wrote them. ``values``:
        the list that keeps what is built; ``again``: by an attempt that was stopped; ``begun``: see
        ``EffectSlot.apply``; ``read``: values that the host read in this call, by the number of the read."""
        values = values if values is not None else [None] * self.count
        groups, effects = self.others if in_place else (self.numbers, self.effects)
        if again:
            for number in self.owned:
                if values[self.first_positions[number]] is not None:  # else the next replay would find it there
                    self.places[number] = None
            groups = tuple([number for number in groups if values[self.first_positions[number]] is None])
        if not in_place:
            self.untouched = None
        if self.inference:
            with torch.inference_mode():
                self._build_fresh(pool, values, groups)
        else:
            self._build_fresh(pool, values, groups)
        for position, alias in self.aliases:
            base = leaves[alias.source] if isinstance(alias.source, int) else statics(alias.source)
            native.tell_uses((base,))
            values[position] = alias.build(base)
        self._give_kinds(values)
        for position, value in self.constants:
            values[position] = value
        for position, which in self.reads if read else ():
            values[position] = read[which]
        for position, first in self.repeats:
            values[position] = values[first]
        return self.finish(values, named_values, effects, begun)

    def _build_fresh(self, pool: Pool, values: list[Any], groups: tuple[int, ...]) -> None:
        known = None if self.preserving else self.tensors
        left = native.hand_out(self.sources, self.live, self.first_positions, values, groups, known)
        self.build_left(pool, values, left)
        for position, geometry, device in self.empties:
            values[position] = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype, device=device)
        self._give_kinds(values)

    def _give_kinds(self, values: list[Any]) -> None:
        """Make tensors of their kinds (class, gradients, attributes). May be called again for the same values."""
        for position, kind in self.kinds:
            if values[position] is not None and not kind.is_of(values[position]):
                values[position] = kind.given_to(values[position])
        if self.kinds and not self.preserving:
            for number, group in enumerate(self.groups):
                if self.live[number] is not None:
                    self.tensors[number] = [weakref.ref(values[at]) for at in group.positions]

    def build_left(self, pool: Pool | None, values: list[Any], groups: Sequence[int]) -> None:
        """Tensors of groups that C could not hand out. ``pool``: not needed for a lone tensor."""
        if self.collect is not None and not self.owned.isdisjoint(groups):
            self.collect()
            for number in self.owned.difference(groups):  # handed out already, before this was stopped
                self.places[number] = None
        for number in groups:
            group, shared = self.groups[number], self.shared_storages[number]
            found = self.places[number] if number in self.owned and not self.inference else None
            if isinstance(found, torch.Tensor) and self.live[number] is None:  # so are the gradients of a step
                values[group.positions[0]], self.places[number] = found, None
                continue
            if number in self.owned:
                tensors = self._taken(number)
            elif shared is not None:
                tensors = [shared.renewed()]
                self.live[number] = shared.held
            else:
                assert pool is not None
                tensors = pool.views(group.block, group.geometries)
                self.live[number] = hold(tensors[0].untyped_storage())
            others = [*zip(group.positions, self._hand_out(number, tensors), strict=True)]
            for position, tensor in reversed(others):  # these tensors come first: they show that all of them are there
                values[position] = tensor
            self.places[number] = None

    def _taken(self, number: int) -> list[torch.Tensor]:
        """The tensor that a replay left for an owned group."""
        found = self.places[number]
        tensors: list[torch.Tensor] = found if isinstance(found, list) else [found]
        return on_storage(tensors[0].untyped_storage(), tensors) if self.inference else tensors

    def finish(
        self,
        values: Sequence[Any],
        named_values: Callable[[], dict[str, Any]],
        effects: Sequence[EffectSlot] | None = None,
        begun: Begun | None = None,
    ) -> Any:
        """Put leaves into the result's structure and set effects: all, if none are given."""
        made: dict[Any, Any] = {(OwnContainer, number): value for number, (value, _) in self.own.items()}
        begun = [] if begun is None else begun
        result = self.fills(values) if self.fills is not None else fill(self.skeleton, values, named_values, made)
        effects = self.effects if effects is None else effects
        filled = [
            fill(effect.skeleton, values, named_values, made) for effect in effects
        ]  # former values, of which there are none yet
        holders: dict[int, Any] = {}
        for effect, value in zip(effects, filled, strict=True):
            if not effect.is_gradient:
                holders.clear()  # it may be on the way to others
            elif not begun:  # as ``apply`` does then, without a search for what was begun
                effect.put_back(named_values, value, holders)
                continue
            effect.apply(named_values, value, begun, holders)
        return result

    def done_by(self, changes: Sequence[Change], named_values: Callable[[], dict[str, Any]]) -> Begun:
        """Effects that the run which made these changes has left in their places."""
        pairs = zip(self.effects, changes, strict=True)
        return [(slot, DONE) for slot, change in pairs if slot.is_done(change, named_values)]

    def own_reads(self, kept: Sequence[Any]) -> list[Any]:
        """For ``build``, where the recording run's own reads are the call's: they have happened once, and no replay
        of the last segment repeats them."""
        values: list[Any] = [None] * self.count
        for position, _ in self.reads:
            values[position] = kept[position]
        return values

    def own_values(
        self, kept: Sequence[Any], leaves: Sequence[Any], statics: Callable[[str], torch.Tensor]
    ) -> list[Any]:
        """The leaves that the recording run itself made, with the caller's tensors in place of staged ones."""
        values = list(kept)
        for position, alias in self.aliases:
            base = leaves[alias.source] if isinstance(alias.source, int) else statics(alias.source)
            values[position] = alias.build(base)
        for position, first in self.repeats:
            values[position] = values[first]
        return values

    def adopt(self, tensors: Sequence[Any], *, copied: bool = False) -> list[Any]:
        """Hand out the leaves that the recording run itself made, instead of building new ones. ``copied``: none of
        them lies in the pool, unless it is part of a graph."""
        values, self.untouched = list(tensors), None
        for number, group in enumerate(self.groups):
            mine = [values[position] for position in group.positions]
            if number in self.owned or (copied and not any(tensor.requires_grad for tensor in mine)):
                with torch.inference_mode() if self.inference else contextlib.nullcontext():
                    mine = on_storage(mine[0].untyped_storage().clone(), mine)
            else:
                self.live[number] = hold(mine[0].untyped_storage())
            for position, tensor in zip(group.positions, self._hand_out(number, mine), strict=True):
                values[position] = tensor
        self._give_kinds(values)
        for position, first in self.repeats:
            values[position] = values[first]
        return values

    def _hand_out(self, number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.preserving and self.live[number] is not None:
            self.tensors[number] = [weakref.ref(tensor) for tensor in tensors]
        return tensors
