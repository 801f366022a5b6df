"""The operators of a run, as they come -> ``RunTrace``.

``ObserveMode`` is a dispatch mode: it sees every operator, backward ones too. The recording run uses the same class
with ``execute`` replaced, so that a recording is checked by the same eyes.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from attrs import define, evolve, field
from typing_extensions import override

from capture.core import slow_calls
from capture.core.facts import (
    CodeLocation,
    Draw,
    GradientUse,
    HostSync,
    HostWork,
    Island,
    Mutation,
    MutationEvidence,
    Unkeyed,
)
from capture.key.modes import NAMES, ambient
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_meta import is_in_order, is_part_of_one, memory_of, nbytes_of, storage_of
from capture.observe import host_values, islands, operator_schema, returned_value, source_location
from capture.observe.higher_order import HigherOrderMode
from capture.observe.operator_schema import (
    TENSORS,
    OperatorTraits,
    breaks,
    looked_up,
    on_one_device,
    plain,
    plain_inputs,
    read_text,
    tensors_in,
    tensors_out,
    traits,
    written,
)
from capture.observe.probes.device_syncs import device_syncs
from capture.observe.probes.metadata_reads import COUNTING
from capture.observe.released_gradients import ReleasedGradients, keep
from capture.observe.trace import External, Produced, Reshaped, scalars_of
from capture.state.snapshot import Snapshot
from capture.torch_private.capabilities import autocast_inside, generator_id, unseen, without_modes
from capture.torch_private.devices import captures_kernels
from capture.torch_private.generators import default_generator, default_generators, was_drawn
from capture.torch_private.operators import is_higher_order, resolving_conjugates
from capture.torch_private.subclasses import is_wrapper, only_shapes

_NOTHING = contextlib.nullcontext()
_LEAST_ADDRESS = 1 << 16
_RESIZING = "UntypedStorage.resize_"
_SEEDING = "seeding a generator, or setting its state,"


class AtIslands(Protocol):
    """Tells what happens in Python around an island."""

    def begin(self) -> tuple[str | None, tuple[islands.Place, ...]]:
        """What the body has changed so far: the path of what a replay could not put out before the island, if anything,
        and the places of the rest."""

    def end(self) -> None:
        """What differs from then on is of the body again."""


@define(eq=False)
class IslandBegin:
    """What is known of an island that is about to run."""

    name: str
    where: CodeLocation | None
    obstacle: str | None = None
    fix: str = ""
    before: islands.Before = field(factory=islands.Before)
    """What the body changed in Python, and the island finds."""
    versions: dict[int, int | str] = field(factory=dict)
    """Of memory that the body used so far, by ``id`` of the storage."""


class ObserveMode(HigherOrderMode):
    """Writes down what a body does. ``undo``: keep the first contents of all external memory it writes."""

    notes_code = True
    hides_faults = True
    """The body goes on where a note of its operators fails; not so in a capture, which is to end."""

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler (1.1 s) to keep it from tracing the mode

    def __init__(self, *, undo: bool = False) -> None:
        super().__init__()
        self.keep_undo = undo
        self.thread = threading.get_ident()
        self.looks_away = False
        """What runs is no part of the body."""
        self.before = Snapshot()
        self.generators: dict[int, str] = {}
        self._operator: str | None = "code outside of operators"
        self._at: CodeLocation | None = None
        self.arguments: set[int] = set()
        """``id`` of the storages of the leaves the body was given."""
        self._leaves: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._device: torch.device | None = None
        """The one that was noted last."""
        self._began, self._has_others = time.monotonic(), False
        self._drawn_by_others: set[int] = set()
        """Generators that other threads drew from meanwhile, by ``generator_id``."""
        self._emptied: list[weakref.ref[torch.UntypedStorage]] = []
        """Storages on the CPU that the body made and gave other memory."""
        self.fault: Exception | None = None
        """What went wrong in this library while the body ran: from then on it runs unwatched."""
        self._raised: BaseException | None = None
        self._ran: tuple[Any] | None = None
        self._arrays = host_values.Arrays()
        self._is_reading = False
        self.is_aside = False
        """An island runs, which is no part of what is watched."""
        self.at_islands: AtIslands | None = None
        self._modes: Any = None
        """Those in force when the run began."""
        self.autocast: dict[str, bool] = {}
        """Device types for which autocast is on in the body; inside the mode torch answers no."""

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled functions inside the body would run their original code

    def look_away(self) -> None:
        """The body goes on in the child of a fork, where nothing is to be made of it."""
        self.looks_away = True

    def begin(self, arguments: list[tuple[str, Any]]) -> None:
        """The run begins: the state before it is noted, and these are the leaves the body gets."""
        tensors = [(path, leaf) for path, leaf in arguments if isinstance(leaf, torch.Tensor)]
        self.arguments = {id(storage_of(leaf)) for _, leaf in tensors}
        self._leaves = [(path, weakref.ref(leaf)) for path, leaf in tensors]
        generators = [leaf for _, leaf in arguments if isinstance(leaf, torch.Generator)]
        generators += [source.get() for source in self.before.generators.values()]
        for generator in (*default_generators(), *generators):
            self._drawn[generator_id(generator)] = (generator, generator.get_state())
        self._began, self._has_others = time.monotonic(), threading.active_count() > 1
        self._modes = ambient()

    def end(self) -> None:
        """The run is over. A generator that stands elsewhere than its draws left it was seeded or set by the body."""
        self.settle_scratch()
        if self._arrays.have_changed(self._arrays.all()):
            self.note_sync("numpy")
        for generator, _ in self._drawn.values():
            self._look_at(generator)

    def _look_at(self, generator: torch.Generator) -> torch.Tensor:
        """Its state. Where it is not the one that the last draw left, others drew from it, or the body set it."""
        now, key = generator.get_state(), generator_id(generator)
        known = self._drawn.get(key)
        if known is None or torch.equal(known[1], now):
            return now
        if self._has_others and was_drawn(known[1], now, time.monotonic() - self._began):
            self._drawn_by_others.add(key)
        else:
            self.note_unsafe(_SEEDING)
        self._drawn[key] = generator, now
        return now

    def is_drawn_by_others(self, generator: torch.Generator) -> bool:
        """Another thread drew from it since the run began, which must not be undone."""
        self._look_at(generator)
        return generator_id(generator) in self._drawn_by_others

    def note_unsafe(self, op: str) -> None:
        """Note what no replay does again, and no operator tells of, once."""
        if not any(one.op == op for one in self.trace.work):
            self.trace.work.append(HostWork(op=op, kind="unsafe", where=source_location.user_location()))

    def note_unkeyed(self, name: str, holder: torch.Tensor | torch.UntypedStorage) -> None:
        """The body asks a caller's tensor for what the next call may answer otherwise, and nothing checks. State that
        moves is checked, but for how often it was written, and for the place in its storage, where code counts."""
        storage = holder if isinstance(holder, torch.UntypedStorage) else storage_of(holder)
        if id(storage) in self.arguments or (name in ("_version", *COUNTING) and self.before.owners(storage)):
            kind: Literal["answer", "place"] = "place" if name in COUNTING else "answer"
            self._note_unkeyed(f"{type(holder).__name__}.{name}", kind, storage)

    def note_form(self) -> None:
        """The body asks a tensor for its strides."""
        self.trace.reads_form = True

    def _note_unkeyed(self, name: str, kind: Literal["answer", "place", "beside"], storage: Any) -> None:
        """Whose storage it is. Nobody else's counts, such as what the body made."""
        given = [path for path, leaf in self._given() if storage_of(leaf) is storage]
        if paths := given or [source.path for source, _ in self.before.owners(storage)]:
            found = Unkeyed(name=name, kind=kind, paths=tuple(paths), where=source_location.user_location())
            if found not in self.trace.unkeyed:
                self.trace.unkeyed.append(found)

    def note_resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage is about to get other memory. One that is empty before the body and after it, as those in which
        ``fully_shard`` gathers parameters, holds memory that the body makes and gives up again."""
        produced = self.trace.produced.get(id(storage))
        if produced is not None and produced.storage() is storage:
            if storage.device.type == "cpu" and id(storage) not in self.trace.scratch:
                self._emptied.append(produced.storage)  # a tape goes on where the memory was
        elif storage.nbytes():
            self.note_unsafe(_RESIZING)
        else:
            self.trace.scratch[id(storage)] = storage
            metadata = (torch.uint8, (nbytes,), storage.device, False, torch.strided)
            self.trace.produced[id(storage)] = Produced(
                weakref.ref(storage), _RESIZING, source_location.user_location(), metadata
            )

    def dropping(self, versions: list[tuple[torch.Tensor, int]]) -> Callable[[torch.Tensor], object]:
        """What to do where the body drops a gradient; a recorder, which may have to give it back, leaves it alone."""
        if self.keep_undo:
            return keep
        return self.quietly(ReleasedGradients(self.before, versions, self.quietly).free)

    def settle_scratch(self) -> None:
        """The run is over: storages that were empty before it have to be empty now."""
        for key, storage in self.trace.scratch.items():
            if storage.nbytes():
                self.note_unsafe(_RESIZING)
            else:
                self.trace.produced.pop(key, None)
        if any((kept := one()) is None or kept.nbytes() for one in self._emptied):
            self.note_unsafe(_RESIZING)  # else they are kept, and empty: a first call makes them for all that follow

    def execute(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator; a recorder replaces this."""
        return self.operate(looked_up(op)[1], args, kwargs)

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator itself: what it raises is the body's."""
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self._raised = error
            if isinstance(error, Exception) and not operator_schema.raises_on_shapes(function, args, kwargs):
                # the body may catch it: then values decided what it does
                self.quietly(self.note_sync)(f"{self._operator or 'an operator'}, which raised {type(error).__name__},")
            raise
        self._ran = (result,)
        return result

    def forget_operator(self) -> None:
        """The run is over: keep nothing alive of its last operator."""
        self._raised = self._ran = None
        self._arrays.forget()

    def quietly(self, note: Callable[..., object]) -> Callable[..., None]:
        """The same where code of the body comes by: it is not to see what goes wrong in a note."""

        def noted(*args: Any) -> None:
            if self.is_aside:
                return
            try:
                note(*args)
            except Exception as error:
                if not self.hides_faults:
                    raise
                self.fault = self.fault or error

        return noted

    def is_temporary(self, tensor: torch.Tensor) -> bool:
        """The body made this memory although no operator told so; a recorder may know."""
        del tensor
        return False

    @override
    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.fault is not None:
            return op(*args, **kwargs)
        self._ran = None
        slow_calls.tick()
        try:
            return self._watch(op, types, args, kwargs)
        except Exception as error:
            if error is self._raised or not self.hides_faults:
                raise
            self.fault = error
            ran: tuple[Any] | None = self._ran
        finally:
            self._ran = None  # what torch makes is a fresh tensor as long as nobody else has it
        return op(*args, **kwargs) if ran is None else ran[0]

    def _watch(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and note it."""
        if not (types and TENSORS.issuperset(types)) and any(map(is_wrapper, types)):
            return NotImplemented  # it opens itself: its operators on plain tensors come next
        known = None if self.looks_away or self._arrays else plain.get(id(op))
        inputs = None if known is None or only_shapes() else plain_inputs(args, kwargs)
        if known is None or inputs is None:
            return self._watch_any(op, args, kwargs)
        return self._watch_plain(op, known, args, kwargs, inputs)

    def _watch_plain(
        self, op: Any, known: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> Any:
        """One that reads tensors of one device and makes some: most are, and each step of ``_watch_any`` takes time."""
        trace, at = self.trace, source_location.user_location()
        self._at, self._operator, was_plain = at, known.name, trace.plain
        trace.plain = False
        among, produced = set(), trace.produced
        for tensor in inputs:
            storage = tensor.untyped_storage()
            key = id(storage)
            among.add(key)
            made = produced.get(key)
            if made is None or made.storage() is not storage:
                self._see_input(tensor, storage, known)
                if tensor.is_cpu and (key in self.arguments or self.before.tensors.get(key)) and tensor.dim():
                    trace.cpu_work.setdefault(id(at), (known.name, at))
        self._note_device(inputs[0].device)
        result = self.execute(op, args, kwargs)
        trace.plain, made_any = was_plain, False
        for tensor in (result,) if type(result) is torch.Tensor else tensors_out(result):
            made_any = self._see_output(tensor, known, among) or made_any
        trace.reads_form = trace.reads_form or _reads_form(known, inputs, result)
        trace.num_ops += made_any
        trace.sequence.append(known.name)
        trace.scalars.append(scalars_of(known, args, kwargs, constant=None))
        trace.lines.append(at)
        return result

    def _watch_any(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_higher_order(op):
            return self.higher_order(op, args, kwargs)
        known, trace = traits(op), self.trace
        if known.metadata == "storage" and len(args) > 1 and isinstance(args[1], torch.UntypedStorage):
            op, args = operator_schema.with_tensor(args)
            known = traits(op)
        if known.base == "_efficientzerotensor":  # zeros without memory, as in the backward pass of ``sgn``
            op, trace.plain = torch.ops.aten.zeros.default, False
            known = traits(op)
        if known.unseen or self.looks_away or only_shapes():
            return op(*args, **kwargs)
        if known.composite is not None and torch.is_inference_mode_enabled():
            with self:  # elsewhere torch opens it before a mode sees it
                return known.composite(*args, **kwargs)
        self._at = None
        inputs = list(tensors_in(args, kwargs))
        storages, devices = list(map(storage_of, inputs)), {tensor.device for tensor in inputs}
        if self._arrays and self._arrays.have_changed(storages):
            self.note_sync("numpy")
        lifted = known.lifts  # torch.tensor(...): a constant, new memory on every run
        plain, trace.plain = trace.plain and known.plain, False
        for tensor, storage in zip(inputs, storages, strict=True):
            if not lifted or self.before.is_within_reach(storage):
                self._see_input(tensor, storage, known)
        if lifted and self._is_lent(inputs[0]):
            self.trace.work.append(HostWork(op=known.name, kind="array", where=self._line()))
        self._see_host(known, args, kwargs, inputs, devices)
        if known.collective or (known.base == "wait_tensor" and not self.made(inputs[0])):
            self.trace.add_collective(op, known, (args, kwargs), inputs, self._line())
        given: list[tuple[torch.Tensor, torch.Size]] = []
        if known.writes or known.norm is not None:
            self._see_writes(known, args, kwargs)
            given += [(one, one.shape) for one in operator_schema.given_outs(known, kwargs) if not self.made(one)]
        states = self._states(kwargs, inputs) if known.draws else None
        self._operator = known.name if on_one_device(devices, kwargs) else None  # copies are looked at elsewhere
        is_complex = any(map(torch.is_complex, inputs))
        result = self._execute(op, known, args, kwargs, is_complex=is_complex)
        if self._arrays and self._arrays.may_see(storage_of(one) for one, _ in written(known, args, kwargs)):
            self.note_sync("numpy")
        if given and any(tensor.shape != shape for tensor, shape in given):
            self.note_unsafe(f"{known.name} with an out= of another shape")
        if breaks(known, args, kwargs):
            trace.reads.append(self.told(known, result))
            trace.note_break("value" if known.reads_host else "size", known.base, self._line())
        trace.plain = plain and not is_complex  # False stays where an operator raised: no sequence tells of that one
        if states is not None:
            self._see_draws(known, states, kwargs)
        if known.foreign or known.reaches:
            self._see_addresses(known, args, kwargs, result)
        made, among = False, set() if lifted else set(map(id, storages))
        for tensor in tensors_out(result):
            made = self._see_output(tensor, known, among) or made
        trace.reads_form = trace.reads_form or _reads_form(known, inputs, result)
        trace.num_ops += made or bool(known.writes)
        trace.sequence.append(known.name)
        trace.scalars.append(scalars_of(known, args, kwargs, constant=self._made_constant(known, inputs)))
        trace.lines.append(self._line())
        return result

    def _execute(
        self, op: Any, known: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_complex: bool
    ) -> Any:
        """Run it as it runs without a mode."""
        casting = [kind for kind in known.casts_inside if self.autocast.get(kind)] if known.casts_inside else ()
        if not (is_complex or casting):
            return self.execute(op, args, kwargs)
        with autocast_inside(casting) if casting else _NOTHING, resolving_conjugates() if is_complex else _NOTHING:
            return self.execute(op, args, kwargs)

    def _line(self) -> CodeLocation | None:
        """The user's line that runs the present operator, looked up once for all that is noted of it."""
        if self._at is None:
            self._at = source_location.user_location()
        return self._at

    def _see_input(self, tensor: torch.Tensor, storage: Any, op: OperatorTraits) -> None:
        produced = self.trace.produced.get(id(storage))
        if produced is not None and produced.storage() is storage:
            return
        if isinstance(storage, torch.UntypedStorage) and not nbytes_of(storage) and tensor.numel():
            return  # nothing is there to be read yet
        self.trace.objects.add(id(tensor))
        external = self.trace.externals.get(id(storage))
        if external is None and id(storage) not in self.arguments and self.is_temporary(tensor):
            return
        if external is None:
            self.trace.externals[id(storage)] = External(self._to_keep(tensor), storage, self._line())
        if torch.is_grad_enabled() and tensor.requires_grad and op.base not in operator_schema.DETACHING:
            use = GradientUse(path=None, op=op.name, where=self._line())
            self.trace.gradients.setdefault((id(storage), ""), use)

    def _to_keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """What compiled code made is kept by an alias: autograd takes a gradient that nobody else has as it is."""
        plain = captures_kernels(tensor.device) and tensor.layout is torch.strided and not tensor.is_nested
        return tensor.detach() if plain and not self.before.owners(tensor.untyped_storage()) else tensor

    def _see_host(
        self, op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor],
        there: set[torch.device],
    ) -> None:  # fmt: skip
        if breaks(op, args, kwargs):
            where = inputs[0].device.type if inputs and not op.collective else None
            self.note_sync(op.name, data_dependent_shape=not op.reads_host, compared_on=where)
        if op.unsafe or (op.metadata != "no" and inputs and not self.made(inputs[0])):
            self.trace.work.append(HostWork(op=op.name, kind="unsafe", where=self._line()))
            if op.metadata != "no":
                self.trace.reshaped.append(_shape_of(inputs[0]))
        for device in there:
            self._note_device(device)
        devices = {device.type for device in there}
        target = kwargs.get("device")
        crossing = len(devices) > 1 or (
            target is not None and bool(devices) and torch.device(target).type not in devices
        )
        if "cpu" not in devices and not crossing:
            return
        on_cpu = [one for one in inputs if one.device.type == "cpu" and one.dim() and not self._is_constant(one)]
        if on_cpu and not crossing:
            at = self._line()
            self.trace.cpu_work.setdefault(id(at), (op.name, at))
        elif crossing and op.base in ("_to_copy", "copy_", "copy"):
            onto = torch.device(target) if target is not None else inputs[0].device
            if onto.type == "cpu":  # the other way round the engine keeps a copy on the device up to date
                self.note_sync(op.name)

    def read_on_host(
        self, name: str, tensor: torch.Tensor, read: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Code reads values in a way that no operator tells of. Gives what it read."""
        if self._is_reading or self.is_aside or self.fault is not None or self.looks_away:
            return read(tensor, *args, **kwargs)
        told = host_values.told_by(name, tensor)
        self._is_reading = True  # what it is made of is read with it
        self.quietly(self._note_reading)(name, tensor if told is not None else None)
        try:
            with _NOTHING if told is None else unseen():
                result = read(tensor, *args, **kwargs)
                if told is not None:
                    self.quietly(self._note_read)(name, tensor, told, args, kwargs, result)
        finally:
            self._is_reading = False
        return result

    def _note_reading(self, name: str, tensor: torch.Tensor | None) -> None:
        self.note_sync(name, compared_on=None if tensor is None else tensor.device.type)

    def _note_read(
        self, name: str, tensor: torch.Tensor, told: host_values.Told, args: tuple[Any, ...], kwargs: dict[str, Any],
        result: Any,
    ) -> None:  # fmt: skip
        storage, trace = tensor.untyped_storage(), self.trace
        self._at, trace.plain = None, False
        self._see_input(tensor, storage, traits(torch.ops.aten.item.default))
        text = read_text(told(tensor, *args, **kwargs))
        trace.reads.append(text)
        trace.note_break("value", name, self._line())
        trace.sequence.append(f"host.{name}")
        trace.scalars.append(tuple(map(repr, (*args, *kwargs.items()))))
        trace.lines.append(self._line())
        if name in host_values.ARRAYS:
            self._arrays.add(tensor, result)
        self.end_at_read(f"host.{name}", text, told, (tensor, *args), kwargs)

    def island(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The body calls a function that is to run eagerly in every replay. Gives its result."""
        if self.is_aside or self.fault is not None or self.looks_away:
            return islands.call(function, args, kwargs)
        before = IslandBegin(islands.name_of(function), source_location.user_location())
        with unseen():
            self.quietly(self.begin_island)(before, args, kwargs)
        self.is_aside = True
        try:
            with without_modes():
                drawn = [generator for generator, _ in self._drawn.values()]
                outcome, result = islands.perform(function, args, kwargs, generators=drawn, before=before.before)
        finally:
            self.is_aside = False
        found = [result]
        with unseen():
            self.quietly(self._end_island)(before, outcome, args, kwargs, found)
        if outcome.error is not None:
            raise outcome.error
        return found[0]

    def begin_island(self, begin: IslandBegin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An island is about to run: what stands in the way of a recording, as far as that is known before it."""
        try:
            islands.check_arguments((args, kwargs), self.is_of_every_call)
        except islands.UnsuitedError as unsuited:
            begin.obstacle = str(unsuited)
            begin.fix = "detach" if "gradients" in begin.obstacle else "inside"
        if self.at_islands is not None:
            changed, places = self.at_islands.begin()
            begin.before = islands.Before.now(places)
            if changed is not None and begin.obstacle is None:
                begin.obstacle = f"is called after the body changed {changed}, and would see it as it was"
                begin.fix = "order"
        if begin.obstacle is None and ambient().values[1:] != self._modes.values[1:]:
            begin.obstacle = "is called under other modes than the captured function"
        for key, external in self.trace.externals.items():
            begin.versions[key] = islands.version_of(external.tensor)
            if self.keep_undo and external.mutation is None:
                self.trace.undo.append((external.tensor, external.storage.clone()))

    def modes_left(self) -> list[str]:
        """Which modes are others than before the body, once it is over. A run that only follows another one tells
        nothing: that one did."""
        if self._modes is None:
            return []
        now, before = ambient().values, self._modes.values
        return [name for name, one, other in zip(NAMES, now, before, strict=True) if one != other]

    def is_of_every_call(self, value: Any) -> bool:
        """The object is the one that each call with this key has in its place, as it is reached from the receiver, from
        globals and the like: a guard sees to that where code names it. Arguments may be others in each call."""
        for source, one in list(self.before.sources.values()):
            if one is value:
                root = [*source.chain()][-1]
                return root.kind != "root" or root.path in ("self", "function")
        return False

    def _end_island(
        self, begin: IslandBegin, outcome: islands.Outcome, args: tuple[Any, ...], kwargs: dict[str, Any],
        found: list[Any],
    ) -> None:  # fmt: skip
        """It is over. ``found``: its result, in the place of which the body may get another."""
        trace, known = self.trace, traits(torch.ops.aten.item.default)
        self._at, trace.plain = begin.where, False
        if self.at_islands is not None:
            self.at_islands.end()
        for generator, state in outcome.generators:
            self._drawn[generator_id(generator)] = (generator, state)
        obstacle = begin.obstacle or outcome.unsuited
        if outcome.error is not None:
            obstacle = obstacle or f"raises {type(outcome.error).__name__}, which the body catches"
        fix = begin.fix if begin.obstacle else "clone" if "keeps" in (obstacle or "") else ""
        trace.islands.append(Island(name=begin.name, where=begin.where, obstacle=obstacle, fix=fix))
        tensors = list(islands.tensors_of((args, kwargs, begin.before.values)))
        for tensor in tensors if obstacle is None else ():
            self._see_input(tensor, tensor.untyped_storage(), known)
        for key, external in trace.externals.items():
            wrote = key in begin.versions and islands.version_of(external.tensor) != begin.versions[key]
            wrote = wrote or any(storage_of(tensors[number]) is external.storage for number, _ in outcome.written)
            if wrote and external.mutation is None:
                external.mutation = Mutation(evidence="version", op=f"{begin.name}()", where=begin.where)
        for tensor in outcome.made or islands.tensors_of(found[0]) if outcome.unsuited else outcome.made:
            self.note_made(tensor)
        trace.reads.append(read_text(outcome.told))
        trace.note_break("island", begin.name, begin.where, outcome.ms)
        trace.sequence.append(f"island.{begin.name}")
        trace.scalars.append(tuple(repr(one) for one in (*args, *kwargs.values()) if type(one) in PLAIN_TYPES))
        trace.lines.append(begin.where)
        self.end_at_island(begin, obstacle, outcome, args, kwargs, found)

    def note_shared_state(self, paths: list[str]) -> None:
        """Places that an island changed, and the body, too: which of both did what is not known."""
        if paths and self.trace.islands:
            told = f"changes {paths[0]}, which the body changes, too"
            self.trace.islands = [evolve(one, obstacle=told, fix="order") for one in self.trace.islands]

    def end_at_island(
        self, begin: IslandBegin, obstacle: str | None, outcome: islands.Outcome, args: tuple[Any, ...],
        kwargs: dict[str, Any], found: list[Any],
    ) -> None:  # fmt: skip
        """A recorder, whose segment ends there, replaces this."""

    def end_at_read(
        self, name: str, text: str, told: host_values.Told, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The host got this in a way that no operator tells of. A recorder, whose segment ends there, replaces this."""

    def _note_device(self, device: torch.device) -> None:
        if device != self._device:
            self._device = device
            self.trace.devices.add(str(device))

    def note_export(self, tensor: torch.Tensor) -> None:
        """A device tensor is handed to another library, whose kernels no operator tells of."""

    def told(self, op: OperatorTraits, result: Any) -> str:
        """What the host learns from this operator, or where the body returns it, if that is all that comes of it."""
        place = returned_value.place_of_read() if op.base == "_local_scalar_dense" else None
        return read_text(result) if place is None else f"{returned_value.RETURNED}{place}"

    def device_syncs(self) -> contextlib.AbstractContextManager[None]:
        """Look for syncs that no schema tells of."""
        return device_syncs(self._note_device_sync, lambda: self._operator)

    def _note_device_sync(self, op: str) -> None:
        where = source_location.user_location()  # an operator that reads values was noted for its line before it ran
        if where is None or not any(at[:2] == (where.file, where.line) for at in self.trace.syncs):
            self.note_sync(op)

    def note_hook(self, name: str) -> None:
        """Note a use of the autograd graph itself, once."""
        if not self.trace.hooks:
            self.trace.hooks.append((name, source_location.user_location()))

    def note_checkpoint(self) -> None:
        """Note a block that the backward pass runs again."""
        self.trace.has_checkpoints = True

    def note_sync(self, op: str, *, data_dependent_shape: bool = False, compared_on: str | None = None) -> None:
        """Note a host read, once a line. ``compared_on``: what is read on such a device may be compared."""
        where = source_location.user_location()
        kind = (data_dependent_shape, compared_on)
        at = (where.file, where.line, *kind) if where else (op, 0, *kind)
        if at not in self.trace.syncs:
            self.trace.syncs[at] = HostSync(
                op=op, where=where, data_dependent_shape=data_dependent_shape, is_compared=compared_on is not None,
                device=compared_on or "", through=source_location.called_by_user(),
            )  # fmt: skip

    def _see_writes(self, op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor, from_norm in written(op, args, kwargs):
            external = self.trace.externals.get(id(storage_of(tensor)))
            if op.base.startswith("_foreach_"):
                self.trace.lists.add(id(storage_of(tensor)))
            if external is None or external.mutation is not None:
                continue
            evidence: MutationEvidence = "norm" if from_norm else "schema"
            external.mutation = Mutation(evidence=evidence, op=op.name, where=self._line())
            if self.keep_undo:
                self.trace.undo.append((external.tensor, external.storage.clone()))
                self.trace.reshaped.append(_shape_of(tensor))

    def _given(self) -> list[tuple[str, torch.Tensor]]:
        return [(path, leaf) for path, one in self._leaves if (leaf := one()) is not None]

    def _is_address(self, number: int) -> bool:
        """It lies in memory that is the caller's."""
        if number < _LEAST_ADDRESS:
            return False
        given = [leaf.untyped_storage() for _, leaf in self._given() if leaf.layout is torch.strided]
        return any(begin <= number < end for begin, end in map(memory_of, (*self.before.storages, *given)))

    def _see_addresses(self, op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Memory that operators get by numbers. A copy of an argument lies elsewhere, with nothing beside it."""
        if op.reaches:
            seen = torch.as_strided(*args, **kwargs) if op.base == "as_strided_copy" else result
            given = [leaf for _, leaf in self._given() if storage_of(leaf) is storage_of(seen)]
            if given and not is_part_of_one(seen, given):
                self._note_unkeyed(op.name, "beside", storage_of(seen))
        elif any(map(self._is_address, operator_schema.numbers_in(args, kwargs))):
            self.trace.work.append(HostWork(op=op.name, kind="address", where=self._line()))

    def _made_constant(self, op: OperatorTraits, inputs: list[torch.Tensor]) -> torch.Tensor | None:
        """The CPU tensor whose values the body itself made of Python values: a drift of them must be seen."""
        if not inputs or inputs[0].device.type != "cpu":  # under vmap torch makes a tensor of a number by ``_to_copy``
            return None
        made_here = op.base.startswith("lift") or (op.base == "_to_copy" and not self._is_known(inputs[0]))
        return inputs[0] if made_here else None

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        """A CPU tensor on memory of somebody else's, such as an array."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or self._is_known(tensor):
            return False
        return not tensor.untyped_storage().resizable()

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Made by the body itself of what it knows, as far as operators tell."""
        return self.made(tensor) or not self._is_known(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        storage = storage_of(tensor)
        return id(storage) in self.arguments or self.made(tensor) or bool(self.before.tensors.get(id(storage)))

    def _states(
        self, kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> tuple[torch.Generator, torch.Tensor] | None:
        generator = kwargs.get("generator")
        if generator is None:
            device = kwargs.get("device") or (inputs[0].device if inputs else "cpu")
            generator = default_generator(torch.device(device))
        return generator, self._look_at(generator)

    def _see_draws(
        self, op: OperatorTraits, before: tuple[torch.Generator, torch.Tensor], kwargs: dict[str, Any]
    ) -> None:
        generator, state = before
        now = generator.get_state()
        if torch.equal(state, now):
            return
        self._drawn[generator_id(generator)] = (generator, now)
        name = "default" if kwargs.get("generator") is None else self.generators.get(generator_id(generator), "unknown")
        where = self._line()
        key = (name, op.name, where)
        count = self.trace.draws[key].count + 1 if key in self.trace.draws else 1
        device = str(generator.device)
        self.trace.draws[key] = Draw(generator=name, device=device, op=op.name, count=count, where=where)

    def _see_output(self, tensor: torch.Tensor, op: OperatorTraits, input_storages: set[int]) -> bool:
        self._note_device(tensor.device)
        storage = storage_of(tensor)
        if id(storage) in input_storages:
            return False
        self.trace.produced[id(storage)] = Produced.of(storage, tensor, op.name, self._line())
        self.trace.note_memory(storage)
        return True

    def note_made(self, tensor: torch.Tensor) -> None:
        """The tensor was made for the body, unseen."""
        storage = storage_of(tensor)
        self.trace.produced[id(storage)] = Produced.of(storage, tensor, "capture", None)

    def made(self, tensor: torch.Tensor) -> bool:
        """An operator of the body made this tensor's memory."""
        produced = self.trace.produced.get(id(storage_of(tensor)))
        return produced is not None and produced.storage() is not None

    def alive(self) -> dict[int, Produced]:
        """Memory made by the body that is still in use."""
        return {key: produced for key, produced in self.trace.produced.items() if produced.storage() is not None}


def _reads_form(op: OperatorTraits, inputs: list[torch.Tensor], result: Any) -> bool:
    return op.reads_form or not (op.view or all(map(is_in_order, (*inputs, *tensors_out(result)))))


def _shape_of(tensor: torch.Tensor) -> Reshaped:
    return tensor, tensor.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride()
