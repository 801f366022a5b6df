"""The operators of a run, as they come -> ``RunTrace``.

``ObserveMode`` sees every operator, backward ones too, where a dispatch mode would (``torch_private.operator_watch``).
The recording run uses the same class with ``execute`` replaced, so that a recording is checked by the same eyes.
``run_notes`` has what is noted beside that, ``break_notes`` where the host reads values and around islands.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from capture.core import slow_calls
from capture.core.facts import Draw, HostWork, Mutation, MutationEvidence
from capture.core.interrupts import is_interrupt
from capture.key.numpy_arrays import MOST_BYTES
from capture.key.tensor_kind import OnHost
from capture.key.tensor_meta import is_in_order, is_part_of_one, is_whole, memory_of, span_bytes, storage_of
from capture.observe import operator_schema, returned_value, source_location
from capture.observe.break_notes import BreakNotes
from capture.observe.host_values import Arrays
from capture.observe.operator_schema import (
    CALLS_OTHERS,
    TENSORS,
    OperatorTraits,
    breaks,
    is_alike_everywhere,
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
from capture.observe.trace import Produced, Reshaped, RunTrace, scalars_of
from capture.torch_private.capabilities import autocast_inside, generator_id
from capture.torch_private.devices import captures_kernels
from capture.torch_private.generators import default_generator
from capture.torch_private.operators import is_higher_order, kernel_of_others, resolving_conjugates
from capture.torch_private.subclasses import is_wrapper, only_shapes

_NOTHING = contextlib.nullcontext()
_LEAST_ADDRESS = 1 << 16
_MAKES_BLANK = ("empty", "new_empty")


class ObserveMode(BreakNotes):
    """Writes down what a body does. ``undo``: keep the first contents of all external memory it writes."""

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler (1.1 s), to keep it from tracing the mode

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled functions inside the body would run their original code

    def execute(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator; a recorder replaces this."""
        op_traits, run, _ = looked_up(op)
        result = self.operate(run, args, kwargs)
        if self._takes_to_wait:
            self._note_taken_to_wait(op_traits, tensors_in(args, kwargs))
        return result

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator itself: an exception in here is the body's."""
        self._is_running = True
        try:
            result = self.run(function, args, kwargs)
            self._ran = (result,)  # in here: what comes before this is as if the operator raised it, and it runs once
        except BaseException as error:
            self._raised = error
            if not (is_interrupt(error) or operator_schema.raises_on_shapes(function, args, kwargs)):
                # the body may catch it: then values decided what it does
                self.quietly(self.note_sync)(f"{self._operator or 'an operator'}, which raised {type(error).__name__},")
            raise
        finally:
            self._is_running = False
        return result

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it; a recorder whose memory is unlike torch's own may have to help."""
        return function(*args, **kwargs)

    @override
    def see(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.fault is not None:
            return self._unseen(op, args, kwargs)
        self._ran = None
        try:
            slow_calls.tick()
            return self._watch(op, types, args, kwargs)
        except Exception as error:
            if error is self._raised or not self.executes:
                raise
            self.fault = error
            ran: tuple[Any] | None = self._ran
        finally:
            self.trace.host_copies.is_next = False
            self._ran = None  # what torch makes is a fresh tensor as long as nobody else has it
        return self._unseen(op, args, kwargs) if ran is None else ran[0]

    def _unseen(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator after a fault. Nothing is noted of it but what it writes, where the run is to be undone."""
        if self.keep_undo and not is_higher_order(op):
            storages = {id(one): one for one in _storages_written(traits(op), args, kwargs)}
            undoable = [one for one in storages.values() if isinstance(one, torch.UntypedStorage)]
            self.trace.undo.extend((storage, storage.clone()) for storage in undoable)
        return op(*args, **kwargs)

    def _watch(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and note it."""
        if self.trace.host_copies.known and not self.looks_away:
            self.use_on_host(tensors_in(args, kwargs))
        if not (types and TENSORS.issuperset(types)) and any(map(is_wrapper, types)):
            return NotImplemented  # it opens itself: its operators on plain tensors are dispatched next
        is_looked_at = self.looks_away or self._arrays.known or self._borrowed.known
        op_traits = None if is_looked_at else plain.get(id(op))
        inputs = None if op_traits is None or only_shapes() else plain_inputs(args, kwargs)
        if op_traits is None or inputs is None:
            return self._watch_any(op, args, kwargs)
        return self._watch_plain(op, op_traits, args, kwargs, inputs)

    def _watch_plain(
        self,
        op: Any,
        op_traits: OperatorTraits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> Any:
        """Run and note an operator that reads tensors of one device and makes some. Most are such, and each step of
        ``_watch_any`` takes time."""
        trace, at = self.trace, source_location.user_location()
        self._at, self._operator, was_plain = at, op_traits.name, trace.plain
        trace.plain = False
        among, produced = set(), trace.produced
        for tensor in inputs:
            storage = tensor.untyped_storage()
            key = id(storage)
            among.add(key)
            made = produced.get(key)
            if made is None or made.storage() is not storage:
                self._see_input(tensor, storage, op_traits)
                from_outside = tensor.is_cpu and (key in self.arguments or self.before.tensors.get(key))
                if from_outside and tensor.dim() and not is_alike_everywhere(op_traits, args, kwargs):
                    trace.cpu_work.setdefault(id(at), (op_traits.name, at))
        self._see_blank(op_traits, inputs)
        self._note_device(inputs[0].device)
        result = self.execute(op, args, kwargs)
        trace.plain, made_any = was_plain, False
        outs = [result] if type(result) is torch.Tensor else tensors_out(result)
        for tensor in outs:
            made_any = self._see_output(tensor, op_traits, among) or made_any
        _note_form(trace, op_traits, inputs, outs)
        trace.num_ops += made_any
        trace.sequence.append(op_traits.name)
        trace.scalars.append(scalars_of(op_traits, args, kwargs, constant=None))
        trace.lines.append(at)
        return result

    def _watch_any(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_higher_order(op):
            return self.higher_order(op, args, kwargs)
        op_traits, trace = traits(op), self.trace
        if op_traits.metadata == "storage" and len(args) > 1 and isinstance(args[1], torch.UntypedStorage):
            op, args = operator_schema.with_tensor(args)
            op_traits = traits(op)
        if op_traits.base == "_efficientzerotensor":  # without memory, as in the backward pass of ``sgn``
            op, trace.plain = torch.ops.aten.zeros.default, False
            op_traits = traits(op)
        if op_traits.unseen or self.looks_away or only_shapes():
            return op(*args, **kwargs)
        if (opened := _opened(op, op_traits)) is not None:
            with self, autocast_inside(self._casting(op_traits)):
                return opened(*args, **kwargs)
        self._at, inputs = None, tensors_in(args, kwargs)
        storages, devices = list(map(storage_of, inputs)), {tensor.device for tensor in inputs}
        if self._arrays.known or self._borrowed.known:
            self._look_at_arrays(op_traits, lambda arrays: arrays.have_changed(storages))
        lifted = op_traits.lifts  # torch.tensor(...): a constant, new memory on every run
        plain, trace.plain = trace.plain and op_traits.plain, False
        for tensor, storage in zip(inputs, storages, strict=True):
            if not lifted or self.before.is_within_reach(storage):
                self._see_input(tensor, storage, op_traits)
        if lifted and self._is_lent(inputs[0]):
            if (given := self._given_array(inputs[0])) is not None:
                return self._watch_any(torch.ops.aten.alias.default, (given,), {})
            args = (self._of_array(op_traits, inputs[0]), *args[1:])
        self._see_host(op_traits, args, kwargs, inputs, devices)
        if op_traits.collective or (op_traits.base == "wait_tensor" and not self.made(inputs[0])):
            self.trace.add_collective(op, op_traits, (args, kwargs), inputs, self._line())
        if op_traits.writes or op_traits.norm is not None:
            self._see_writes(op_traits, args, kwargs)
        self._see_blank(op_traits, inputs)
        outs = [(out, out.shape) for out in operator_schema.given_outs(op_traits, kwargs) if not self.made(out)]
        states = self._states(kwargs, inputs) if op_traits.draws else None
        self._operator = op_traits.name if on_one_device(devices, kwargs) else None  # copies are looked at elsewhere
        is_complex = any(map(torch.is_complex, inputs))
        result = self._execute(op, op_traits, args, kwargs, is_complex=is_complex)
        if self._arrays.known or self._borrowed.known:
            self._look_at_arrays(op_traits, lambda arrays: arrays.may_see(_storages_written(op_traits, args, kwargs)))
        if outs and any(tensor.shape != shape for tensor, shape in outs):
            self.note_unsafe(f"{op_traits.name} with an out= of another shape")
        if breaks(op_traits, args, kwargs):
            trace.reads.append(self.read_text_of(op_traits, result))
            trace.note_break("value" if op_traits.reads_host else "size", op_traits.base, self._line())
        trace.plain = plain and not is_complex  # False stays where an operator raised: no sequence tells of that one
        if states is not None:
            self._see_draws(op_traits, states, kwargs)
        if op_traits.foreign or op_traits.reaches:
            self._see_addresses(op_traits, args, kwargs, result)
        made, among, made_by = False, set() if lifted else set(map(id, storages)), tensors_out(result)
        for tensor in made_by:
            made = self._see_output(tensor, op_traits, among) or made
        _note_form(trace, op_traits, inputs, made_by)
        trace.num_ops += made or bool(op_traits.writes)
        trace.sequence.append(op_traits.name)
        trace.scalars.append(scalars_of(op_traits, args, kwargs, constant=self._made_constant(op_traits, inputs)))
        trace.lines.append(self._line())
        return result

    def _casting(self, op: OperatorTraits) -> list[str]:
        """Device types for which autocast is on that the operator casts for inside."""
        return [kind for kind in op.casts_inside if self.autocast.get(kind)]

    def _execute(
        self, op: Any, op_traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_complex: bool
    ) -> Any:
        """Run the operator as it runs without a mode."""
        casting = self._casting(op_traits)
        if op_traits.casts_inside and casting != [
            kind for kind in op_traits.casts_inside if kind in self.autocast_around
        ]:
            self.note_unsafe(f"{op_traits.name} under another autocast than its caller's")
        versions = _versions_of_lists(op_traits, args, kwargs)
        if not (is_complex or casting):
            result = self.execute(op, args, kwargs)
        else:
            with autocast_inside(casting) if casting else _NOTHING, resolving_conjugates() if is_complex else _NOTHING:
                result = self.execute(op, args, kwargs)
        _count_writes(versions)
        if self.trace.host_copies.is_next:
            sync = self._sync_here(op_traits.name, False, None)
            self.trace.host_copies.note(OnHost(op, kwargs), op_traits.name, result, sync)
        return result

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
        on_cpu = [
            input_
            for input_ in inputs
            if input_.device.type == "cpu" and input_.dim() and not self._is_constant(input_)
        ]
        if on_cpu and not crossing and not is_alike_everywhere(op, args, kwargs):
            at = self._line()
            self.trace.cpu_work.setdefault(id(at), (op.name, at))
        elif crossing and op.base in ("_to_copy", "copy_", "copy"):
            onto = torch.device(target) if target is not None else inputs[0].device
            if onto.type == "cpu":  # in the other direction the engine keeps a copy on the device up to date
                is_copy = op.base == "_to_copy" and captures_kernels(inputs[0].device) and _is_plain(inputs[0])
                self.trace.host_copies.is_next = is_copy
                if not is_copy:
                    self.note_sync(op.name)

    def _see_blank(self, op: OperatorTraits, inputs: list[torch.Tensor]) -> None:
        """Look for operands on memory that no operator wrote."""
        if self.blank and not op.view and any(map(self.is_blank, inputs)):
            self.note_blank_use()

    def read_text_of(self, op: OperatorTraits, result: Any) -> str:
        """What the host learns from this operator, or where the body returns it, if that is all that comes of it."""
        reads = self.trace.reads
        if self.formulas is not None and op.base == "_local_scalar_dense" and self.formulas.takes(reads):
            self.trace.kept[len(reads)] = (result, [])
            self.trace.taken.append(len(reads))
            return returned_value.TAKEN
        place = returned_value.place_of_read(result) if op.base == "_local_scalar_dense" else None
        if place is None:
            return read_text(result)
        text = f"{returned_value.RETURNED}{place[0]}"
        if place[1] or returned_value.is_computed(text):
            self.trace.kept[len(self.trace.reads)] = (result, place[1])
        return text

    def _see_writes(self, op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for array in self.trace.arrays.values():
            array.note_written(_storages_written(op, args, kwargs))
        for tensor, from_norm in written(op, args, kwargs):
            self.blank.pop(id(storage_of(tensor)), None)
            external = self.trace.externals.get(id(storage_of(tensor)))
            if external is None or external.mutation is not None:
                continue
            evidence: MutationEvidence = "norm" if from_norm else "schema"
            external.mutation = Mutation(evidence=evidence, op=op.name, where=self._line())
            if self.keep_undo:
                self.trace.undo.append((external.storage, external.storage.clone()))
                self.trace.reshaped.append(_shape_of(tensor))

    def _is_address(self, number: int) -> bool:
        """Whether the number is an address of the caller's memory."""
        if number < _LEAST_ADDRESS:
            return False
        given = [leaf.untyped_storage() for _, leaf in self._given() if leaf.layout is torch.strided]
        return any(begin <= number < end for begin, end in map(memory_of, (*self.before.storages, *given)))

    def _see_addresses(self, op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note memory that operators reach by offsets in a storage. A copy of an argument lies elsewhere, with no other
        data around it."""
        if op.reaches:
            seen = torch.as_strided(*args, **kwargs) if op.base == "as_strided_copy" else result
            given = [leaf for _, leaf in self._given() if storage_of(leaf) is storage_of(seen)]
            if given and not is_part_of_one(seen, given):
                self._note_unkeyed(op.name, "beside", storage_of(seen))
        elif any(map(self._is_address, operator_schema.numbers_in(args, kwargs))):
            self.trace.work.append(HostWork(op=op.name, kind="address", where=self._line()))

    def _made_constant(self, op: OperatorTraits, inputs: list[torch.Tensor]) -> torch.Tensor | None:
        """The CPU tensor that the body itself made of Python values, if this is one: a drift of its values must be
        seen."""
        if not inputs or inputs[0].device.type != "cpu":  # under vmap torch makes a tensor of a number by ``_to_copy``
            return None
        made_here = op.base.startswith("lift") or (op.base == "_to_copy" and not self._is_known(inputs[0]))
        return inputs[0] if made_here else None

    def _is_lent(self, tensor: torch.Tensor) -> bool:
        """Whether it is a CPU tensor on memory that does not belong to torch, such as an array's."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or self._is_known(tensor):
            return False
        return not tensor.untyped_storage().resizable()

    def _look_at_arrays(self, op: OperatorTraits, differ: Callable[[Arrays], bool]) -> None:
        """Python wrote an array that shares memory with an operand, or the operator did."""
        if self._arrays.known and differ(self._arrays):
            self.note_sync("numpy")
        if self._borrowed.known and differ(self._borrowed):
            self._note_array(op)

    def _of_array(self, op: OperatorTraits, tensor: torch.Tensor) -> torch.Tensor:
        """The operand for a tensor on the memory of an array that is no argument: a constant, as one made of numbers.

        What the array holds follows from what guards look at, as other values that Python makes. It is one as long as
        nothing writes the array while the body runs (``end``), no operator writes the tensor, and nothing that the call
        leaves lies there (``lies_in_array``). An array that shares memory with a tensor may follow the arguments, and
        ``runtime.arrays`` looks at those among the arguments.
        """
        if tensor.untyped_storage().nbytes() > MOST_BYTES or self._arrays or self._lies_in_known(tensor):
            self._note_array(op)
            return tensor
        self._borrowed.add(tensor, self)
        self._borrowed_at = HostWork(op=op.name, kind="array", where=self._line())
        return self.constant_of(tensor)

    def constant_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, for the body to go on with. A recorder gives memory that nobody else has."""
        return tensor

    def _note_array(self, op: OperatorTraits) -> None:
        self.trace.work.append(HostWork(op=op.name, kind="array", where=self._line()))

    def _lies_in_known(self, tensor: torch.Tensor) -> bool:
        """Whether it shares memory with a tensor, or with an array among the arguments, which may become an input."""
        first = tensor.data_ptr()
        end = first + span_bytes(tensor)
        known = [owners[0][1] for owners in self.before.tensors.values()]
        known += [leaf for _, reference in self._leaves if (leaf := reference()) is not None]
        storages = [one.untyped_storage() for one in (*known, *self.arrays_given) if one.layout is torch.strided]
        reaches = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
        return any(begin < end and first < limit for begin, limit in (*reaches, *self.array_arguments))

    def _given_array(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The argument, or the part of it, on whose memory a tensor was made of an array."""
        for given in self.arrays_given:
            first, at = given.data_ptr(), tensor.data_ptr()
            if given.dtype != tensor.dtype or not (first <= at < first + span_bytes(given)):
                continue
            if at == first and given.shape == tensor.shape and given.stride() == tensor.stride():
                return given
            begin = (at - first) // given.element_size()
            if (at - first) % given.element_size() or not (given.is_contiguous() and tensor.is_contiguous()):
                return None
            if begin + tensor.numel() > given.numel():
                return None
            return self._part(given, begin, tensor)
        return None

    def _part(self, given: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
        flat = self._watch_any(torch.ops.aten.view.default, (given, [given.numel()]), {})
        if tensor.numel() != given.numel():
            part = (flat, 0, begin, begin + tensor.numel())
            flat = self._watch_any(torch.ops.aten.slice.Tensor, part, {})
        found: torch.Tensor = self._watch_any(torch.ops.aten.view.default, (flat, list(tensor.shape)), {})
        return found

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether the body made it from constants alone, as far as operators show."""
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
        if tensor.device != self._device:
            self._note_device(tensor.device)
        storage = storage_of(tensor)
        if id(storage) in input_storages:
            return False
        self.trace.produced[id(storage)] = Produced.of(storage, tensor, op.name, self._line())
        self.trace.note_memory(storage)
        if op.base.startswith(_MAKES_BLANK) and tensor.numel():
            self.blank[id(storage)] = weakref.ref(storage)
        return True


def _opened(op: Any, op_traits: OperatorTraits) -> Callable[..., Any] | None:
    """What runs the operators that this one is made of, where those are recorded in its place."""
    if op_traits.base in CALLS_OTHERS:
        return kernel_of_others(op)
    # elsewhere torch opens such an operator before it is seen
    return op_traits.composite if torch.is_inference_mode_enabled() else None


def _note_form(trace: RunTrace, op: OperatorTraits, inputs: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    """Note whether results may follow from the form of what the operator got."""
    if not trace.reads_form:
        trace.reads_form = op.reads_form or not (op.view or all(map(is_in_order, (*inputs, *outs))))
    if not trace.reads_whole and (op.foreign or op.view or op.metadata != "no"):
        trace.reads_whole = op.foreign or _sees_others([*inputs, *outs])


def _sees_others(tensors: list[torch.Tensor]) -> bool:
    """Whether memory of whole numbers may be seen as that of others. Sums of such are the same in any order."""
    kinds = {tensor.dtype for tensor in tensors}
    return len(kinds) > 1 and len(set(map(is_whole, kinds))) > 1


def _shape_of(tensor: torch.Tensor) -> Reshaped:
    return tensor, tensor.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is its memory alone."""
    return tensor.layout is torch.strided and not (tensor.is_complex() or tensor.is_neg() or tensor.is_nested)


def _storages_written(op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [storage_of(tensor) for tensor, _ in written(op, args, kwargs)]


def _versions_of_lists(
    op: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, int]]:  # fmt: skip
    """The tensors that an operator writes through lists (``_foreach_*``), with their versions before."""
    if not op.writes or not op.base.startswith("_foreach_"):
        return []
    return [(tensor, tensor._version) for tensor, _ in written(op, args, kwargs) if not tensor.is_inference()]


def _count_writes(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Under a dispatch mode an operator that takes the list apart, as on the CPU, counts no writes; one kernel for all
    counts them. They are counted on the tensors of the list: those of ``tensor.data`` have counters of their own.
    ``_fused_*`` are never counted."""
    for tensor, version in versions:
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)
