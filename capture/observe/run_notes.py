"""Notes of a run: its memory, generators and host reads, wherever they are seen."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch

from capture.core.facts import CodeLocation, GradientUse, HostSync, HostWork, Unkeyed
from capture.key.modes import NAMES, ambient
from capture.key.tensor_meta import nbytes_of, storage_of
from capture.observe import host_values, islands, operator_schema, source_location
from capture.observe.forms import Form
from capture.observe.higher_order import HigherOrderMode
from capture.observe.host_copies import HostCopy
from capture.observe.operator_schema import OperatorTraits
from capture.observe.probes.device_syncs import device_syncs, is_taken_to_wait
from capture.observe.probes.metadata_reads import COUNTING
from capture.observe.released_gradients import ReleasedGradients, keep
from capture.observe.trace import External, Produced
from capture.state.snapshot import Snapshot
from capture.torch_private.capabilities import generator_id
from capture.torch_private.devices import AUTOCAST_TYPES, captures_kernels, may_wait
from capture.torch_private.generators import default_generators, was_drawn
from capture.torch_private.subclasses import unseen
from capture.torch_private.threads import others_may_run

UNWRITTEN = "memory that no operator writes"
_RESIZING = "UntypedStorage.resize_"
SEEDING = "seeding a generator, or setting its state,"


class AtIslands(Protocol):
    """Finds out what happens in Python around an island."""

    def begin(self, reach: Collection[int] | None) -> tuple[str | None, tuple[islands.Place, ...]]:
        """What the body has changed so far: the path of what a replay could not put out before the island, if anything,
        and the places of the rest. ``reach``: ``id`` of all that the island sees, where that is known."""

    def end(self) -> Sequence[islands.StateChange]:
        """What differs from then on is of the body again. Gives what the island changed, but for members of
        containers."""


_storage_unseen = unseen(storage_of)


class RunNotes(HigherOrderMode):
    """What is noted of a run beside what an operator does. ``undo``: see ``ObserveMode``."""

    notes_code = True
    executes = True
    """The body's operators run, and where a note of them fails the body goes on. In a capture nothing happens but the
    body's Python, and such a fault is to end it."""

    def __init__(self, *, undo: bool = False) -> None:
        super().__init__()
        self.keep_undo = undo
        self.thread = threading.get_ident()
        self.looks_away = False
        """What runs is no part of the body."""
        self.arrays_given: list[torch.Tensor] = []
        """Tensors that the body got as arrays."""
        self.is_tried = False
        """See ``Call.is_tried``."""
        self.left_trace = False
        """It was about to leave what cannot be undone."""
        self.formulas: Any = None
        """See ``Call.formulas``."""
        self.array_arguments: list[tuple[int, int]] = []
        """Where arrays among the arguments begin and end that are no inputs so far."""
        self.before = Snapshot()
        self.generators: dict[int, str] = {}
        self._operator: str | None = "code outside of operators"
        """The operator that runs or ran last; None: what it waits for is looked at elsewhere."""
        self._is_running = False
        """That operator runs now. torch tells of a wait in code around it, such as ``torch.tensor``, after it."""
        self._takes_to_wait = False
        """Waits cannot be looked for: see ``device_syncs``."""
        self._at: CodeLocation | None = None
        self.arguments: set[int] = set()
        """``id`` of the storages of the leaves the body was given."""
        self._leaves: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self._device: torch.device | None = None
        """The device that was noted last."""
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
        self._borrowed = host_values.Arrays()
        """Arrays that the body made tensors of, on their memory."""
        self._borrowed_at: HostWork | None = None
        """Where it did so last."""
        self._is_reading = False
        self.is_aside = False
        """Whether an island runs, which is no part of what is watched."""
        self.at_islands: AtIslands | None = None
        self.islands_ran: list[islands.Outcome] = []
        """Outcomes of islands that ran in a capture, of which nothing else has happened until a replay follows."""
        self._modes: Any = None
        """Modes in force when the run began."""
        self.blank: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages by ``id`` that the body made and no operator has written so far."""
        self.uses_blank = False
        """The body read such memory, or left it: operators of torch that are made of others may write it themselves."""
        self.autocast_around: frozenset[str] = frozenset()
        """Device types for which it was on when the run began, as it is in a replay."""
        self.autocast: dict[str, bool] = {}
        """Device types for which autocast is on in the body; inside the mode torch answers no."""

    def look_away(self) -> None:
        """Stop noting: the body goes on in the child of a fork, where no recording comes of it."""
        self.looks_away = True

    def begin(self, arguments: list[tuple[str, Any]]) -> None:
        """The run begins: the state before it is noted, and these are the leaves the body gets."""
        tensors = [(path, leaf) for path, leaf in arguments if issubclass(type(leaf), torch.Tensor)]
        self.arguments = {id(_storage_unseen(leaf)) for _, leaf in tensors}
        self._leaves = [(path, weakref.ref(leaf)) for path, leaf in tensors]
        generators = [leaf for _, leaf in arguments if issubclass(type(leaf), torch.Generator)]
        generators += [source.get() for source in self.before.generators.values()]
        for generator in (*default_generators(), *generators):
            self._drawn[generator_id(generator)] = (generator, generator.get_state())
        self._began, self._has_others = time.monotonic(), others_may_run()
        self._modes = ambient()
        self.autocast_around = frozenset([kind for kind in AUTOCAST_TYPES if torch.is_autocast_enabled(kind)])

    def end(self) -> None:
        """The run is over. A generator that stands elsewhere than its draws left it was seeded or set by the body."""
        self.settle_scratch()
        if self._arrays.have_changed(self._arrays.all()):
            self.note_sync("numpy")
        if self._borrowed_at is not None and self._borrowed.have_changed(self._borrowed.all()):
            self.trace.work.append(self._borrowed_at)
        for generator, _ in self._drawn.values():
            self._look_at(generator)

    def _look_at(self, generator: torch.Generator) -> torch.Tensor:
        """Its state. Where it is not the one that the last draw left, others drew from it, or the body set it."""
        now, key = generator.get_state(), generator_id(generator)
        state_before = self._drawn.get(key)
        if state_before is None or torch.equal(state_before[1], now):
            return now
        self._has_others = self._has_others or others_may_run()
        if self._has_others and was_drawn(state_before[1], now, time.monotonic() - self._began):
            self._drawn_by_others.add(key)
        else:
            self.note_unsafe(SEEDING)
        self._drawn[key] = generator, now
        return now

    def is_drawn_by_others(self, generator: torch.Generator) -> bool:
        """Whether another thread drew from it since the run began, which must not be undone."""
        self._look_at(generator)
        return generator_id(generator) in self._drawn_by_others

    def note_unsafe(self, op: str) -> None:
        """Note once something that no replay does again and no operator shows."""
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
        """Note that the body asks a tensor for its strides."""
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

    def dropping(
        self, versions: list[tuple[torch.Tensor, int]], forms: list[Form]
    ) -> Callable[[torch.Tensor], object]:  # fmt: skip
        """What to do where the body drops a gradient; a recorder, which may have to give it back, leaves it alone."""
        if self.keep_undo:
            return keep
        return self.quietly(ReleasedGradients(self.before, versions, forms, self.quietly).free)

    def settle_scratch(self) -> None:
        """The run is over: check that storages that were empty before it are empty now."""
        for key, storage in self.trace.scratch.items():
            if storage.nbytes():
                self.note_unsafe(_RESIZING)
            else:
                self.trace.produced.pop(key, None)
        if any((kept := reference()) is None or kept.nbytes() for reference in self._emptied):
            self.note_unsafe(_RESIZING)  # else they are kept, and empty: a first call makes them for all that follow

    def lies_in_array(self, storage: torch.UntypedStorage) -> bool:
        """Whether the body made a tensor on this memory, which is an array's."""
        return self._borrowed.knows(storage)

    def forget_operator(self) -> None:
        """The run is over: drop what is kept of its last operator."""
        self._raised = self._ran = None
        self._arrays.forget()

    def quietly(self, function: Callable[..., object]) -> Callable[..., None]:
        """The same function, for calls in the middle of the body: what goes wrong in a note is hidden from the body."""

        def noted(*args: Any) -> None:
            if self.is_aside:
                return
            try:
                function(*args)
            except Exception as error:
                if not self.executes:
                    raise
                self.fault = self.fault or error

        return noted

    def is_blank(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on memory that the body made and no operator wrote."""
        storage = storage_of(tensor)
        made = self.blank.get(id(storage))
        return made is not None and made() is storage

    def note_blank_use(self) -> None:
        """What no operator is seen to write is used: a mode would have torch call operators for it."""
        if not self.by_mode and not self.uses_blank:
            self.uses_blank = True
            self.note_unsafe(UNWRITTEN)

    def is_temporary(self, tensor: torch.Tensor) -> bool:
        """Whether the body made this memory although no operator showed it; a recorder may know."""
        del tensor
        return False

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
            return  # there is nothing to read yet
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
        """A tensor on this memory to be kept with the run. Where the body made its own there, such as ``tensor.data``,
        the one from outside: the graph that the body's may get would keep memory alive. What compiled code made is kept
        by an alias: autograd takes a gradient that nobody else has as it is."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        storage = tensor.untyped_storage()
        there = [one for _, one in self.before.owners(storage)]
        if id(storage) in self.arguments:
            there += [leaf for _, leaf in self._given() if storage_of(leaf) is storage]
        if there:
            return tensor if any(tensor is one for one in there) else there[0]
        return tensor.detach() if captures_kernels(tensor.device) else tensor

    def modes_left(self) -> list[str]:
        """The modes that differ from before the body, once it is over. A run that only follows another one gives none:
        that one gave them."""
        if self._modes is None:
            return []
        now, before = ambient().values, self._modes.values
        return [name for name, one, other in zip(NAMES, now, before, strict=True) if one != other]

    def _note_device(self, device: torch.device) -> None:
        if device != self._device:
            self._device = device
            self.trace.devices.add(str(device))

    def note_export(self, tensor: torch.Tensor) -> None:
        """Note that a device tensor is handed to another library, whose kernels no operator shows."""

    def device_syncs(self) -> contextlib.AbstractContextManager[None]:
        """Look for waits for the device that no operator's schema shows."""
        return self._device_syncs() if may_wait() else contextlib.nullcontext()

    @contextlib.contextmanager
    def _device_syncs(self) -> Iterator[None]:
        operator, is_running = lambda: self._operator, lambda: self._is_running
        with device_syncs(self._note_device_sync, operator, is_running) as self._takes_to_wait:
            yield

    def _note_taken_to_wait(self, op: OperatorTraits, tensors: Iterable[torch.Tensor]) -> None:
        """Note an operator that waits as far as is known, where other threads keep this one from looking."""
        if is_taken_to_wait(op.name, op.base) and any(captures_kernels(tensor.device) for tensor in tensors):
            self._note_device_sync(op.name)

    def _note_device_sync(self, op: str) -> None:
        if self.is_aside:
            return
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
        at, sync = self._sync_here(op, data_dependent_shape, compared_on)
        self.trace.syncs.setdefault(at, sync)

    def _sync_here(self, op: str, data_dependent_shape: bool, compared_on: str | None) -> tuple[Any, HostSync]:
        where = source_location.user_location()
        kind = (data_dependent_shape, compared_on)
        at = (where.file, where.line, *kind) if where else (op, 0, *kind)
        return at, HostSync(
            op=op, where=where, data_dependent_shape=data_dependent_shape, is_compared=compared_on is not None,
            device=compared_on or "", through=source_location.called_by_user(),
        )  # fmt: skip

    def use_on_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """Code of the body gets these tensors: where it copied one from a device, it waits for that."""
        for copy in self.trace.host_copies.used(tensors):
            self.wait_for(copy)

    def wait_for(self, copy: HostCopy) -> None:
        """More comes of this copy than that it is returned or kept."""
        self.trace.syncs.setdefault(*copy.sync)

    def _given(self) -> list[tuple[str, torch.Tensor]]:
        return [(path, leaf) for path, one in self._leaves if (leaf := one()) is not None]

    def note_made(self, tensor: torch.Tensor) -> None:
        """Note a tensor that code which is not seen made for the body."""
        storage = storage_of(tensor)
        self.trace.produced[id(storage)] = Produced.of(storage, tensor, "capture", None)

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of the body made this tensor's memory."""
        produced = self.trace.produced.get(id(storage_of(tensor)))
        return produced is not None and produced.storage() is not None

    def original(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that this one is a copy of, where the recording makes the copy in every call; None for all
        others."""
        del tensor
        return None

    def alive(self) -> dict[int, Produced]:
        """The memory that the body made and still uses."""
        return {key: produced for key, produced in self.trace.produced.items() if produced.storage() is not None}
