"""Notes of breaks: reads by the host without an operator, and islands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, field

from capture.core.data import define
from capture.core.facts import CodeLocation, Island, Mutation
from capture.key.modes import ambient
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_kind import ArraySteps
from capture.key.tensor_meta import storage_of
from capture.observe import host_values, islands, returned_value, source_location
from capture.observe.operator_schema import read_text, traits
from capture.observe.probes.host_reads import no_gradient_reads
from capture.observe.probes.printing import LeavesTraceError
from capture.observe.returned_value import Kept
from capture.observe.run_notes import RunNotes
from capture.observe.trace import HandedOut
from capture.state.optimizers import reach_of_step
from capture.torch_private import subclasses
from capture.torch_private.capabilities import generator_id, unseen, without_modes
from capture.torch_private.operator_watch import hidden

_NOTHING = contextlib.nullcontext()


@define(eq=False)
class IslandBegin:
    """The state before an island runs."""

    name: str
    where: CodeLocation | None
    obstacle: str | None = None
    fix: str = ""
    before: islands.Before = field(factory=islands.Before)
    """What the body changed in Python, as the island finds it."""
    is_undoable: bool = False
    versions: dict[int, int | str] = field(factory=dict)
    """Versions of the memory that the body used so far, by ``id`` of the storage."""


class BreakNotes(RunNotes):
    """Notes values that the host reads, and what islands do."""

    def read_on_host(
        self, name: str, tensor: torch.Tensor, read: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Code reads values without an operator. Gives what it read."""
        if self._is_reading or self.is_aside or self.fault is not None or self.looks_away:
            return read(tensor, *args, **kwargs)
        reader = host_values.describer_of(name, tensor)
        uses: tuple[list[Kept], dict[str, ArraySteps]] | None = None
        if reader is not None and name in host_values.ARRAYS and not args and not kwargs:
            uses = returned_value.uses_of_array()
        if uses is not None and all(self._is_reached(one.holder) for one in uses[0]):
            return self._hand_out(name, tensor, read, *uses)
        self.use_on_host([tensor])
        place: str | None = None
        if reader is not None and name == "tolist" and tensor.dim() and tensor.numel() <= host_values.MOST_MEMBERS:
            place = returned_value.place_of_list()
            reader = reader if place is None else host_values.flat_list
        self._is_reading = True  # operators that the read itself runs are not noted
        self.quietly(self._note_reading)(name, tensor if reader is not None else None)
        try:
            with _NOTHING if reader is None else unseen():
                result = read(tensor, *args, **kwargs)
                if reader is not None:
                    self.quietly(self._note_read)(name, tensor, reader, args, kwargs, result, place)
        finally:
            self._is_reading = False
        return result

    def _hand_out(
        self, name: str, tensor: torch.Tensor, read: Callable[..., Any], keepers: list[Kept],
        computed: dict[str, ArraySteps],
    ) -> Any:  # fmt: skip
        """Code makes an array that it only returns or keeps. No segment ends: nothing follows from the values."""
        self._is_reading = True  # ``__array__`` calls ``numpy``
        try:
            with unseen():
                array = read(tensor)
        finally:
            self._is_reading = False
        with unseen():
            self.quietly(self._note_handed_out)(name, tensor, array, keepers, computed)
        return array

    def _is_reached(self, holder: Any) -> bool:
        """Whether it is Python state, so that what the body does to it is found after the run."""
        return any(value is holder for _, value in list(self.before.sources.values()))

    def _note_handed_out(
        self, name: str, tensor: torch.Tensor, array: Any, keepers: list[Kept], computed: dict[str, ArraySteps]
    ) -> None:
        trace = self.trace
        self._at, trace.plain = None, False
        self._see_input(tensor, tensor.untyped_storage(), traits(torch.ops.aten.detach.default))
        trace.arrays[id(array)] = HandedOut(array, tensor.detach(), keepers, self._line(), computed)
        trace.sequence.append(f"host.{name}")
        trace.scalars.append(())
        trace.lines.append(self._line())

    def _note_reading(self, name: str, tensor: torch.Tensor | None) -> None:
        self.note_sync(name, compared_on=None if tensor is None else tensor.device.type)

    def _note_read(
        self, name: str, tensor: torch.Tensor, reader: host_values.Describe, args: tuple[Any, ...],
        kwargs: dict[str, Any], result: Any, place: str | None,
    ) -> None:  # fmt: skip
        """``place``: where the body returns a list, if that is all that comes of it."""
        storage, trace = tensor.untyped_storage(), self.trace
        self._at, trace.plain = None, False
        self._see_input(tensor, storage, traits(torch.ops.aten.item.default))
        if self.is_blank(tensor):
            self.note_blank_use()
        value = reader(tensor, *args, **kwargs)
        text = read_text(value) if place is None else f"{returned_value.RETURNED}{place}"
        if place is not None:
            trace.kept[len(trace.reads)] = (value, [])
        trace.reads.append(text)
        trace.note_break("value", name, self._line())
        trace.sequence.append(f"host.{name}")
        trace.scalars.append(tuple(map(repr, (*args, *kwargs.items()))))
        trace.lines.append(self._line())
        if name in host_values.ARRAYS:
            self._arrays.add(tensor, result)
        self.end_at_read(f"host.{name}", text, reader, (tensor, *args), kwargs)

    def island(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The body calls a function that is to run eagerly in every replay. Gives its result."""
        if self.is_aside or self.fault is not None or self.looks_away:
            return islands.call(function, args, kwargs)
        if self.is_tried and reach_of_step(function, args, kwargs) is None:
            self.end_before_trace()
        before = IslandBegin(islands.name_of(function), source_location.user_location())
        with unseen():
            self.quietly(self.begin_island)(before, function, args, kwargs)
        self.is_aside = True
        try:
            with without_modes(), hidden():
                outcome, result = self.perform_island(before, function, args, kwargs)
        finally:
            self.is_aside = False
        results = [result]
        with unseen():
            self.quietly(self._end_island)(before, outcome, args, kwargs, results)
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                del outcome  # which has the error, and the error this frame
        return results[0]

    def end_before_trace(self) -> None:
        """The run is a try, and would now leave what cannot be undone, such as a line of text."""
        self.left_trace = True
        raise LeavesTraceError

    def perform_island(
        self, begin: IslandBegin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[islands.Outcome, Any]:
        """Run the island. A recorder that has only captured the segment so far overrides this: it launches it first."""
        drawn = [generator for generator, _ in self._drawn.values()]
        return islands.perform(function, args, kwargs, generators=drawn, before=begin.before)

    @no_gradient_reads()
    @subclasses.unseen
    def begin_island(
        self, begin: IslandBegin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:  # fmt: skip
        """An island is about to run: note what would make a recording impossible, as far as it shows beforehand."""
        self.use_on_host(islands.tensors_of((args, kwargs)))
        try:
            islands.check_arguments((args, kwargs), self.is_of_every_call)
        except islands.UnsuitedError as unsuited:
            begin.obstacle = str(unsuited)
            begin.fix = "detach" if "gradients" in begin.obstacle else "inside"
        reach = reach_of_step(function, args, kwargs)
        begin.is_undoable = reach is not None
        if self.keep_undo and reach is not None:
            tensors = [value for value in reach.values() if isinstance(value, torch.Tensor)]
            storages = {id(storage): storage for storage in [tensor.untyped_storage() for tensor in tensors]}
            self.trace.undo.extend((storage, storage.clone()) for storage in storages.values())
        if self.at_islands is not None:
            changed, places = self.at_islands.begin(reach)
            begin.before = islands.Before.now(places)
            if changed is not None and begin.obstacle is None:
                begin.obstacle = f"is called after the body changed {changed}, and would see it as it was"
                begin.fix = "order"
        if begin.obstacle is None and ambient().values[1:] != self._modes.values[1:]:
            begin.obstacle = "is called under other modes than the captured function"
        for key, external in self.trace.externals.items():
            begin.versions[key] = islands.version_of(external.tensor)
            if self.keep_undo and external.mutation is None:
                self.trace.undo.append((external.storage, external.storage.clone()))

    def is_of_every_call(self, value: Any) -> bool:
        """Whether each call with this key has the same object in this place: it is reached from the receiver, from
        globals and the like, where a guard checks it. Arguments may be other objects in each call."""
        for source, one in list(self.before.sources.values()):
            if one is value:
                return not source.is_in_argument()
        return False

    @subclasses.unseen
    def _end_island(
        self, begin: IslandBegin, outcome: islands.Outcome, args: tuple[Any, ...], kwargs: dict[str, Any],
        results: list[Any],
    ) -> None:  # fmt: skip
        """Note what an island did. ``results``: its result, which a recorder may replace by the one that the body
        gets."""
        trace, op_traits = self.trace, traits(torch.ops.aten.item.default)
        self._at, trace.plain = begin.where, False
        left = [] if self.at_islands is None else self.at_islands.end()
        if self.islands_ran:
            ran = self.islands_ran[-1]
            self.islands_ran[-1] = evolve(ran, state=(*ran.state, *left))
        for generator, state in outcome.generators:
            if state is not None:
                self._drawn[generator_id(generator)] = (generator, state)
        obstacle = begin.obstacle or outcome.unsuited
        if outcome.error is not None:
            obstacle = obstacle or f"raises {type(outcome.error).__name__}, which the body catches"
        fix = begin.fix if begin.obstacle else "clone" if "keeps" in (obstacle or "") else ""
        trace.islands.append(Island(
                name=begin.name, where=begin.where, obstacle=obstacle, fix=fix,
                is_undoable=begin.is_undoable and outcome.error is None,
            )
        )  # fmt: skip
        tensors = list(islands.tensors_of((args, kwargs, begin.before.values)))
        for tensor in tensors if obstacle is None else ():
            self._see_input(tensor, tensor.untyped_storage(), op_traits)
        for key, external in trace.externals.items():
            wrote = key in begin.versions and islands.version_of(external.tensor) != begin.versions[key]
            wrote = wrote or any(storage_of(tensors[number]) is external.storage for number, _ in outcome.written)
            if wrote and external.mutation is None:
                external.mutation = Mutation(evidence="version", op=f"{begin.name}()", where=begin.where)
        for tensor in outcome.made or islands.tensors_of(results[0]) if outcome.unsuited else outcome.made:
            self.note_made(tensor)
        for array in trace.arrays.values():
            array.note_written()
        trace.reads.append(read_text(outcome.text))
        trace.note_break("island", begin.name, begin.where, outcome.ms)
        trace.sequence.append(f"island.{begin.name}")
        trace.scalars.append(tuple(repr(value) for value in (*args, *kwargs.values()) if type(value) in PLAIN_TYPES))
        trace.lines.append(begin.where)
        self.end_at_island(begin, obstacle, outcome, args, kwargs, results)

    def note_shared_state(self, paths: list[str]) -> None:
        """Note places that both the island and the body changed: it is not known which of them did what."""
        if paths and self.trace.islands:
            told = f"changes {paths[0]}, which the body changes, too"
            self.trace.islands = [evolve(island, obstacle=told, fix="order") for island in self.trace.islands]

    def end_at_island(
        self, begin: IslandBegin, obstacle: str | None, outcome: islands.Outcome, args: tuple[Any, ...],
        kwargs: dict[str, Any], found: list[Any],
    ) -> None:  # fmt: skip
        """Does nothing here. A recorder overrides this and ends its segment."""

    def end_at_read(
        self, name: str, text: str, describe: host_values.Describe, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The host read a value without an operator. Does nothing here; a recorder overrides this and ends its
        segment."""
