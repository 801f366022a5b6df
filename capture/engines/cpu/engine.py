"""The CPU engine: records a body into an arena and replays it as a tape.

It obeys the contract of a device graph: fixed addresses, frozen Python, overwritten outputs, no host reads. The
recording run executes the body for real, operator by operator, while every result is moved into the arena.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from typing_extensions import override

from capture.core.interrupts import let_through
from capture.engines.base import (
    NOTHING_KNOWN,
    Block,
    Geometry,
    Input,
    LiftedNumbers,
    Number,
    NumbersToLift,
    Recorded,
    Recording,
    StateTensors,
)
from capture.engines.cpu import answers, lifting
from capture.engines.cpu.arena import Arena
from capture.engines.cpu.in_place import InPlaceTrial, in_place_form, trial_of
from capture.engines.cpu.number_tensors import NO_NUMBERS, tensors_for_numbers
from capture.engines.cpu.segments import SegmentedTape
from capture.engines.cpu.tape import (
    Leaf,
    Ran,
    Register,
    Tape,
    TapeMemory,
    TapeStep,
    is_whole,
    python_form,
    registers_in,
)  # fmt: skip
from capture.engines.island_arguments import template_of
from capture.engines.staging import InputGroup, copy_uncounted, give_memory, over, put_back, stage
from capture.engines.undo import most_undo
from capture.key.modes import here
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_meta import span_bytes
from capture.observe import collectives
from capture.observe.break_notes import IslandBegin
from capture.observe.described import KeptLeaf
from capture.observe.dispatch_mode import ObserveMode
from capture.observe.expectation import Expectation
from capture.observe.facts_builder import describe
from capture.observe.forms import Form
from capture.observe.host_values import Describe
from capture.observe.islands import Outcome, tensors_of
from capture.observe.operator_schema import (
    Operator,
    OperatorTraits,
    breaks,
    lacks_tensor,
    looked_up,
    tensors_in,
    tensors_out,
)  # fmt: skip
from capture.observe.released_gradients import keep
from capture.observe.run import ObservedRun, run_watched
from capture.state.call import Call
from capture.torch_private import operators
from capture.torch_private.capabilities import generator_id, is_not_resizable

_OWN = frozenset([torch.Tensor, torch.nn.Parameter])
_NO_KWARGS: dict[str, Any] = {}  # of most steps, of which recordings keep many
_MOST_PROOFS, _MOST_MODES = 4096, 16  # of which some are made again, once there are more
_READ_GRAD_MODE = frozenset(["mkldnn_rnn_layer"])  # its kernel makes the workspace of its backward pass in grad mode


class CpuBackend:
    """Implements ``capture.engines.base.Backend``."""

    name = "cpu"
    has_own_memory = False
    executes_recording_runs = True
    rebinds_to_pool = True
    owns_in_place = True
    breaks_at_reads = True
    runs_islands = True
    lifts_numbers = True
    rebinds_tensors = True

    def __init__(self) -> None:
        self._proofs: dict[Any, dict[Any, list[bool]]] = {}
        """What was found out about forms of operators that tapes tried, by the modes that choose kernels."""

    def _proofs_here(self) -> dict[Any, list[bool]] | None:
        now = here()
        proofs = None if now is None else self._proofs.setdefault(now.ambient, {})
        if proofs is not None and (len(proofs) > _MOST_PROOFS or len(self._proofs) > _MOST_MODES):
            self._proofs.clear()
            proofs.clear()
        return proofs

    def memory_bytes(self) -> int:
        """The host's memory; infinite where that is not known."""
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError) as error:
            let_through(error)
            return sys.maxsize

    def new_pool(self) -> Arena:
        """An empty arena."""
        return Arena()

    def lift(
        self, one: Recording, other: Recording, numbers: NumbersToLift
    ) -> LiftedNumbers | str:  # fmt: skip
        """Numbers as registers of the tape: see ``lifting``."""
        assert isinstance(one, Tape)
        assert isinstance(other, Tape)
        return lifting.lift(one, other, numbers)

    def lift_like(
        self, known: LiftedNumbers, other: Recording, given: Sequence[Number]
    ) -> LiftedNumbers | str:  # fmt: skip
        """By the registers of another tape."""
        assert isinstance(known, lifting.TapeNumbers)
        assert isinstance(other, Tape)
        return lifting.lift_like(known, other, given)

    def in_capture(self) -> bool:
        """False: nobody else records CPU work."""
        return False

    def capture_look(self) -> None:
        """Nobody has to be asked."""

    def record(
        self, pool: Arena, call: Call, inputs: Sequence[Input], *, undo: bool = False,
        state: StateTensors = NOTHING_KNOWN, generators: Sequence[torch.Generator] = (),
        expected: Expectation | None = None, may_break: bool = False, schedule: bool = False,
    ) -> Recorded:  # fmt: skip
        """Run the body once with its inputs staged in the arena and its operators written on a tape."""
        del state, generators, expected, schedule
        tape = SegmentedTape(pool, self._proofs_here())
        staged = _Staged(pool, tape, call, inputs)
        recorder = TapeRecorder(pool, tape, undo=undo, may_break=may_break)
        leaves = call.leaves

        def put_out() -> None:
            if call.watched is not None and call.watched.watch is recorder:
                staged.staging.leave_uncounted(call.watched.uncounted_arguments())
                staged.copy_back(leaves, written=_written_positions(call.watched, inputs))

        call.put_out = None if undo else put_out
        watched = run_watched(call, recorder, call.substitute(staged.staging.replacements))
        staged.staging.end_run()
        if not undo:
            put_out()
        if watched.error is not None:
            return Recorded(watched, None, None, failure="the body raised")
        if recorder.fault is not None:
            raise recorder.fault
        described = describe(watched)
        for implicit in described.implicit:
            if implicit.owners:
                tape.name_owner(implicit.path, implicit.owners[0][1])
        kept = [*described.outputs, *(leaf for effect in described.effects for leaf in effect.leaves)]
        failure = recorder.failure or _unresolved(kept, recorder)
        if failure is None and tape.undo_bytes() > most_undo(self.memory_bytes()):
            failure = f"{tape.undo_bytes()} bytes are written before the host reads a value, and would have to be kept"
        blocks = tuple(recorder.block_of(leaf.value) if leaf.kind == "fresh" else None for leaf in kept)
        if failure is None:
            for leaf in kept:
                root = tape.root_of(leaf.value) if leaf.kind == "fresh" else None
                if root is not None:
                    root.is_kept = True
            if tape.reads:
                tape.staged = staged.signature()
                staged.staging.copy_back_only(_written_positions(watched, inputs))
            staged.staging.lend(recorder.trace.lent)
            tape.leave_uncounted(watched.uncounted_writes())
            tape.compile(staged.copies_in(), staged.copies_out(), staged.readable(leaves))
        return Recorded(watched, described, None if failure else tape, failure, blocks)


def _written_positions(watched: ObservedRun, inputs: Sequence[Input]) -> set[int]:
    """Staged leaves that the body wrote, whether planned or not."""
    externals = watched.watch.trace.externals
    versions = {id(tensor) for tensor, version in watched.versions if tensor._version != version}
    positions = set()
    for position, (_, leaf) in enumerate(watched.arguments):
        if isinstance(leaf, torch.Tensor):
            external = externals.get(id(leaf.untyped_storage()))
            if id(leaf) in versions or (external is not None and external.mutation is not None):
                positions.add(position)
    return positions & {input_.position for input_ in inputs if input_.how in ("copy", "copy-back")}


def _unresolved(kept: Sequence[KeptLeaf], recorder: TapeRecorder) -> str | None:
    for leaf in kept:
        if leaf.kind == "foreign":
            return f"{leaf.path} was made outside the dispatcher"
        if leaf.kind == "fresh" and recorder.block_of(leaf.value) is None and leaf.value.numel():
            return f"{leaf.path} is not in the pool"
    return None


class _Staged:
    """The buffers of one recording, which its tape knows, filled with this call's inputs."""

    def __init__(self, arena: Arena, tape: Tape, call: Call, inputs: Sequence[Input]) -> None:
        self._arena, self._tape = arena, tape
        for each_input in inputs:
            leaf = call.leaves[each_input.position]
            if isinstance(leaf, torch.Generator):
                tape.generators[each_input.position] = leaf
        self.staging = stage(
            arena, call, [each_input for each_input in inputs if not _elsewhere(call.leaves[each_input.position])]
        )
        for each_input in inputs:
            leaf = call.leaves[each_input.position]
            if (
                each_input.how == "static"
                and isinstance(leaf, torch.Tensor)
                and leaf.device.type == "cpu"
                and leaf.numel()
            ):
                seen = self.staging.replacements.get(each_input.position, leaf)
                tape.add_static(call.paths()[each_input.position][0], leaf, seen.untyped_storage())
        for block, storage in self.staging.managed.items():
            tape.add_block(block, storage).is_managed = True
        self._registers: list[tuple[int, int]] = []
        with torch.no_grad():
            for single in self.staging.singles:
                collectives.finish(call.leaves[single.position])
                tape.add_block(single.block, single.tensor.untyped_storage())
                single.tensor.copy_(call.leaves[single.position])
                number = tape.register(single.tensor)
                assert number is not None
                self._registers.append((single.position, number))
        for group in self.staging.groups:
            tape.add_block(group.block, group.storage).is_grouped = True
            collectives.finish(*[call.leaves[position] for position in group.members])
            group.copy_in(call.leaves)

    def copy_back(self, leaves: Sequence[Any], written: set[int]) -> None:
        """After the recording run: what the body wrote into staged inputs goes to the caller's tensors."""
        with torch.no_grad():
            counted = {single.position for single in self.staging.singles if single.is_counted}
            for position, number in self._registers:
                if position in written:
                    copy = torch.Tensor.copy_ if position in counted else copy_uncounted
                    copy(leaves[position], self._tape.tensor(number))
            for group in self.staging.groups:
                if written & set(group.members):
                    group.copy_out(leaves)

    def copies_in(self) -> list[TapeStep]:
        """Steps of the tape that stage this call's inputs."""
        singles = [_step("copy_", Register(number), Leaf(position)) for position, number in self._registers]
        return singles + [_step(group.copier(), Leaf(None)) for group in self._groups()]

    def readable(self, leaves: Sequence[Any]) -> dict[int, int]:
        """Registers of inputs that nobody writes, and their positions: a tape that reads them whole may read the
        caller's own, which saves the copy."""
        written = {single.position for single in self.staging.singles if single.back or single.lent}
        return {
            number: position
            for position, number in self._registers
            if position not in written and type(leaves[position]) in _OWN and not leaves[position].is_conj()
        }

    def copies_out(self) -> list[TapeStep]:
        """Steps of the tape that copy mutated inputs back."""
        written = {single.position: single.is_counted for single in self.staging.singles if single.back}
        back = [(position, number) for position, number in self._registers if position in written]
        ways: dict[bool, Callable[..., Any] | str] = {True: "copy_", False: copy_uncounted}
        steps = [_step(ways[written[position]], Leaf(position), Register(number)) for position, number in back]
        groups = self._groups()
        steps += [_step(group.copy_out, Leaf(None)) for group in groups if group.back]
        lent = {single.position for single in self.staging.singles if single.lent}
        unsaid = [(position, number) for position, number in self._registers if position in lent]
        steps += [_step(put_back, Leaf(position), Register(number)) for position, number in unsaid]
        return steps + [_step(group.put_back, Leaf(None)) for group in groups if group.lent]

    def signature(self) -> tuple[Any, ...]:
        """How inputs reach the tape, in a form that can be compared."""
        singles = [(single.position, single.block) for single in self.staging.singles]
        groups = [(tuple(group.members), group.block, group.lead) for group in self.staging.groups]
        return (*singles, *groups)

    def _groups(self) -> list[InputGroup]:
        """The groups of inputs, over storages that do not keep their blocks taken."""
        return [evolve(group, storage=self._arena.storage(group.block)) for group in self.staging.groups]


def _step(function: Callable[..., Any] | str, *args: Any) -> TapeStep:
    return TapeStep(function, args, {}, "call")


def _elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, torch.Generator) or leaf.device.type != "cpu"


class TapeRecorder(ObserveMode):
    """A watch that moves every result into the arena and writes the operator on the tape."""

    def __init__(self, arena: Arena, tape: SegmentedTape, *, undo: bool = False, may_break: bool = False) -> None:
        super().__init__(undo=undo)
        self._arena, self._tape, self._may_break = arena, tape, may_break
        self._blocks: dict[int, Block] = {}
        self._pool_copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """By ``id`` of a storage that the body replaced the memory of: that memory, and the block that replays use for
        it."""
        self.failure: str | None = None
        self._has_islands = False
        """Islands may draw from any generator, which no operator shows."""

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block a result lies in."""
        return self._blocks.get(id(tensor.untyped_storage()))

    @override
    def note_sync(self, op: str, *, data_dependent_shape: bool = False, compared_on: str | None = None) -> None:
        """A host read ends a segment; one that cannot be compared is an error for the recording, as on a device, and
        the body goes on eagerly."""
        follows = compared_on == "cpu" and self._may_break
        super().note_sync(op, data_dependent_shape=data_dependent_shape, compared_on=compared_on if follows else None)
        if not follows:
            self._fail(f"{op} reads values on the host")

    @override
    def look_away(self) -> None:
        super().look_away()
        self._fail("the process is a child that was forked in the body")

    @override
    def lent(self, generator: torch.Generator) -> contextlib.AbstractContextManager[None]:
        self._fail("the default generator is set to another one's state and back, which no operator tells of")
        return super().lent(generator)

    @override
    def note_resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().note_resized(storage, nbytes)
        self._pool_copies.pop(id(storage), None)
        if id(storage) not in self.trace.scratch:
            self._fail("the body gives a storage other memory")
        elif nbytes:
            block, pool_copy = self._arena.take(nbytes)
            self._tape.add_block(block, storage)
            self._pool_copies[id(storage)] = storage, pool_copy

    @override
    def dropping(
        self, versions: list[tuple[torch.Tensor, int]], forms: list[Form]
    ) -> Callable[[torch.Tensor], object]:  # fmt: skip
        return keep

    def _fill_pool_copies(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the values: steps are proven on the registers, which lie in the copies."""
        for key in {id(tensor.untyped_storage()) for tensor in tensors} & set(self._pool_copies):
            storage, pool_copy = self._pool_copies[key]
            whole = Geometry(dtype=torch.uint8, offset=0, shape=(storage.nbytes(),), stride=(1,))
            over(pool_copy, whole).copy_(over(storage, whole))

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    @override
    def constant_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Results lie in the arena, which no operator can resize as it does torch's own memory, for ``out=`` of another
        size or ``resize_``. Such a body is not recorded, and what is resized leaves the arena. The operator had done
        nothing: it resizes before it computes."""
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            let_through(error)
            stuck = {id(tensor.untyped_storage()) for tensor in tensors_in(args, kwargs)} & set(self._blocks)
            if not stuck or not is_not_resizable(error):
                raise
        self._fail("the body gives a tensor more memory")
        self._leave_arena(stuck)
        return function(*args, **kwargs)

    def _leave_arena(self, keys: set[int]) -> None:
        """All tensors on these storages, by ``id``, lie on a copy in memory of torch's own from here on."""
        copies: dict[int, torch.UntypedStorage] = {}
        # not ``isinstance``, which asks a weak proxy for the class of what it stood for
        for tensor in [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]:
            if not _is_plain(tensor) or id(storage := tensor.untyped_storage()) not in keys or storage.resizable():
                continue
            copies[id(storage)] = copies.get(id(storage)) or storage.clone()
            give_memory(tensor, copies[id(storage)])
            self.note_made(tensor)

    @override
    def execute(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, then keep its results in the arena."""
        ran, before = Ran(op), self._tape.num_ops
        self._tape.ran.append(ran)
        result = self._record(op, args, kwargs)
        # a pending collective keeps the tensors alive
        if self._tape.num_ops > before and not self._tape.has_collectives:
            ran.step = self._tape.last_step()
            ran.result = _form_of(ran.step, result, args, kwargs)
        return result

    def _record(self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op_traits, function, _ = looked_up(op)
        is_break, tensors = breaks(op_traits, args, kwargs), tensors_in(args, kwargs)
        for tensor in tensors:
            if not _is_plain(tensor):
                self._fail(f"{op_traits.name} reads a tensor that is quantized, not strided, or not on the CPU")
        if op_traits.metadata != "no" and (op_traits.resizes or not self.made(args[0])):
            self._fail(f"{op_traits.name} changes the shape of a tensor in place")
        if self.failure is not None or op_traits.metadata != "no":
            return self.operate(function, args, kwargs)
        inputs = {id(tensor.untyped_storage()) for tensor in tensors}
        step = self._step(op, op_traits, function, args, kwargs)
        form, trial = (None, None) if step is None or is_break else self._in_place(op, op_traits, step, args, kwargs)
        result = self.operate(function, args, kwargs)
        if op_traits.collective:
            self._tape.has_collectives = True
        # the result is moved below, so it has to be complete
        if op_traits.collective and op_traits.namespace != "c10d":
            result = collectives.finished(op, op_traits.namespace, result)
        outs = tensors_out(result)
        if not all(map(_is_plain, outs)):
            self._fail(f"{op_traits.name} makes a tensor that is quantized, not strided, or not on the CPU")
            return result
        fresh = [out for out in outs if id(out.untyped_storage()) not in inputs]
        if len(fresh) > 1 and len({id(out.untyped_storage()) for out in fresh}) < len(fresh):
            self._fail(f"{op_traits.name} gives tensors that share memory, which its schema does not say")
            return result
        alone = op_traits.opaque or op_traits.collective or op_traits.norm is not None or is_break
        acts = alone or op_traits.writes or result is None  # without a result it is called for its checks
        if step is None or not (fresh or acts):
            if op_traits.base.startswith("lift") and step is not None:
                return self._constant(args[0])
            return result
        flat = result if isinstance(result, (tuple, list)) else [result]
        step.single = isinstance(result, torch.Tensor)
        if any(isinstance(member, (tuple, list)) for member in flat):
            step.function, flat = _flattened(step.function), outs
        moved = {id(out): self._move(out) for out in fresh}
        step.outs = [_source_of(moved.get(id(member))) for member in (outs if is_break else flat)]
        step.form, step.acts = "copy" if fresh else "call", bool(acts or op_traits.draws)
        if op_traits.writes:
            written = [step.args[at] if isinstance(at, int) else step.kwargs.get(at) for at in op_traits.writes]
            step.writes = tuple(registers_in(written))
        step.order = "barrier" if alone else "draws" if op_traits.draws else ""
        plain = not is_break and step.function is function
        if fresh and len(fresh) == len(flat) and plain:
            step.is_whole = all(map(is_whole, fresh))
            self._prefer_out(op_traits, step, fresh, self._numbers_of(op, args, tensors, fresh))
        elif form is not None and self._tape.prove_in_place(form, step, trial):
            step.function = form
        else:
            step.numbers = NO_NUMBERS
        for out in fresh:
            moved[id(out)][0].copy_(out)
        self._tape.append(step)
        if is_break:
            self._end_segment(step, self.read_text_of(op_traits, result))
        if self._pool_copies:
            self._fill_pool_copies(tensors)
        return _replace(result, {key: visible for key, (visible, _, _) in moved.items()}) if moved else result

    @override
    def end_at_read(
        self, name: str, text: str, describe: Describe, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.failure is not None:
            return
        step = self._adopted_step(describe, name, args, kwargs)
        if step is not None:
            step.acts = True
            self._tape.append(step)
            self._tape.ran.append(Ran(name, step, text))
            self._end_segment(step, text)

    @override
    def end_at_island(
        self, begin: IslandBegin, obstacle: str | None, outcome: Outcome, args: tuple[Any, ...],
        kwargs: dict[str, Any], results: list[Any],
    ) -> None:  # fmt: skip
        before = begin.before
        tensors = list(tensors_of((args, kwargs, before.values)))
        if obstacle is not None or not self._may_break:
            self._fail(f"{begin.name}() {obstacle or 'is called where no recording may be cut'}")
        for tensor in (*tensors, *outcome.made):
            if not _is_plain(tensor):
                self._fail(f"{begin.name}() has to do with a tensor that is not on the CPU")
        for tensor in tensors if self.failure is None else ():
            if self._tape.root_of(tensor) is None and not self._adopt(tensor, is_constant=False):
                self._fail(f"{begin.name}() gets memory that nobody is known to own")
        if self.failure is not None:
            return
        grad = torch.is_grad_enabled()
        try:
            templates = [template_of(value, self._island_register) for value in (args, before.values, kwargs)]
        except LookupError as error:
            self._fail(f"{begin.name}(): {error}")
            return
        self._has_islands = True
        moved = {id(made): self._move(made) for made in outcome.made}
        for made in outcome.made:
            moved[id(made)][0].copy_(made)
            self.note_made(moved[id(made)][0])
        outs = [_source_of(moved[id(made)]) for made in outcome.made]
        places = [(id(place.holder()), place.name) for place in before.places]
        name = f"{begin.name} {id(outcome.function):x} {grad} {places}"
        step = TapeStep(
            outcome.function, (templates[0], templates[1]), templates[2], "break", outs, name=name, acts=True
        )
        self._tape.append(step)
        self._tape.ran.append(Ran(self.trace.sequence[-1], step))
        self._end_segment(step, self.trace.reads[-1])
        self._tape.note_island(grad, before.places)
        results[0] = outcome.among(tensors, {key: visible for key, (visible, _, _) in moved.items()})

    def _island_register(self, tensor: torch.Tensor) -> Register:
        number = self._tape.register(tensor)
        if number is None:
            raise LookupError("a lazily conjugated or negated tensor")
        return Register(number)

    def _end_segment(self, step: TapeStep, text: str) -> None:
        trace = self.trace
        wrote = [key for key, external in trace.externals.items() if external.mutation is not None or key in trace.lent]
        names = {name for name, _, _ in trace.draws}
        drew = [
            generator
            for key, (generator, _) in self._drawn.items()
            if self._has_islands or self.generators.get(key, "default") in names
        ]
        self._tape.end_segment(step, text, wrote, drew)

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """``torch.tensor`` in the body: a fresh copy of the same values on every replay."""
        root = self._tape.root_of(tensor) or self._tape.add_constant(tensor)
        del root
        number = self._tape.register(tensor)
        assert number is not None
        visible, target, register = self._move(tensor)
        visible.copy_(tensor)
        step = TapeStep(torch.clone, (Register(number),), {}, "copy", [(target, register)], name="constant")
        self._tape.append(step)
        return visible

    def _in_place(
        self, op: Operator, op_traits: OperatorTraits, step: TapeStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any] | None, InPlaceTrial | None]:
        """Another form of an operator that writes, and copies to try it on, where that is not known yet."""
        writes = op_traits.writes and step.function is operators.fast_operator(op)
        form = in_place_form(op_traits) if writes else None
        if form is None:
            return None, None
        step.numbers = self._numbers_of(op, args, tensors_in(args, kwargs), tensors_in(args[:1], {}))
        return form, trial_of(form, args, kwargs, step.numbers) if self._tape.is_undecided(form, step) else None

    def _numbers_of(
        self, op: Operator, args: tuple[Any, ...], given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        return tensors_for_numbers(op, args, given, results, self._tape.given_numbers)

    def _prefer_out(
        self, op_traits: OperatorTraits, step: TapeStep, fresh: list[torch.Tensor], numbers: Mapping[int, torch.Tensor]
    ) -> None:  # fmt: skip
        function = python_form(op_traits)
        if function is None:
            return
        step.numbers = numbers
        if numbers and not self._tape.prove_out(function, step, fresh):
            step.numbers = NO_NUMBERS
        if step.numbers or self._tape.prove_out(function, step, fresh):
            step.function, step.form = function, "out"
        elif self._tape.prove(function, step, fresh):
            step.function = function

    def _move(self, out: torch.Tensor) -> tuple[torch.Tensor, TapeMemory, int]:
        """A tensor like ``out`` in the arena (the one the body goes on with), its root and register."""
        geometry = Geometry.of(out)
        geometry = evolve(geometry, offset=0) if geometry.offset else geometry
        block = self._arena.allocate(span_bytes(out))
        visible = self._arena.tensor(block, geometry)
        storage = visible.untyped_storage()
        self._arena.track(block, storage)
        self._blocks[id(storage)] = block
        root = self._tape.add_block(block, storage)
        number = self._tape.register(visible)
        assert number is not None
        return visible, root, number

    def _step(
        self, op: Operator, op_traits: OperatorTraits, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> TapeStep | None:  # fmt: skip
        if op_traits.collective:
            function = collectives.waiting(function, op, op_traits.namespace)
        if lacks_tensor(op, args) or (op_traits.base in _READ_GRAD_MODE and torch.is_grad_enabled()):
            function = _below_autograd(function, grad=torch.is_grad_enabled())
        return self._adopted_step(function, op_traits.name, args, kwargs, is_constant=op_traits.lifts)

    def _adopted_step(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *,
        is_constant: bool = False,
    ) -> TapeStep | None:  # fmt: skip
        """The step, with registers in place of tensors."""
        try:
            template = tuple([self._template(value, is_constant=is_constant) for value in args])
            named = {key: self._template(value, is_constant=is_constant) for key, value in kwargs.items()}
        except LookupError as error:
            self._fail(f"{name}: {error}")
            return None
        return TapeStep(function, template, named or _NO_KWARGS, "call", name=name)

    def _adopt(self, tensor: torch.Tensor, *, is_constant: bool) -> bool:
        if is_constant:
            return self._tape.add_constant(tensor) is not None
        owners = self.before.owners(tensor.untyped_storage())
        if owners:
            self._tape.add_static(owners[0][0].path, owners[0][1])
        return bool(owners)

    def _template(self, value: Any, *, is_constant: bool) -> Any:
        if type(value) in PLAIN_TYPES:
            return value
        if isinstance(value, torch.Tensor):
            number = self._tape.register(value)
            if number is None and self._tape.root_of(value) is None:
                if not self._adopt(value, is_constant=is_constant):
                    raise LookupError("it reads memory that nobody is known to own")
                number = self._tape.register(value)
            if number is None:
                raise LookupError("a lazily conjugated or negated tensor")
            return Register(number)
        if isinstance(value, torch.Generator):
            return self._generator(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._template(member, is_constant=is_constant) for member in value])
        return value

    def _generator(self, generator: torch.Generator) -> Any:
        for position, known in self._tape.generators.items():
            if generator_id(known) == generator_id(generator):
                return Leaf(position)
        if generator_id(generator) not in self.generators:
            raise LookupError("a generator that nobody is known to own")
        return generator


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a strided tensor on the host whose memory holds its values as they are."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.device.type == "cpu"


def _form_of(step: TapeStep, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if step.name == "constant":
        return answers.form_of(result, [result], ())
    flat = tensors_out(result)
    if len(flat) != len(step.outs):  # some members are no tensors
        flat = list(result) if isinstance(result, (tuple, list)) else [result]
    made = [tensor if out is not None else None for tensor, out in zip(flat, step.outs, strict=False)]
    return answers.form_of(result, made, tensors_in(args, kwargs))


def _below_autograd(function: Callable[..., Any], *, grad: bool) -> Callable[..., Any]:
    """The function, run in grad mode, which replays turn off, but without making a graph: it does something else
    without grad mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(), torch.set_grad_enabled(grad):
            return function(*args, **kwargs)

    return run


def _source_of(moved: tuple[torch.Tensor, TapeMemory, int] | None) -> tuple[TapeMemory, int] | None:
    return None if moved is None else (moved[1], moved[2])


def _replace(result: Any, by: dict[int, torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return by.get(id(result), result)
    if isinstance(result, (list, tuple)):
        return type(result)([_replace(member, by) for member in result])
    return result


def _flattened(function: Any) -> Any:
    return lambda *args, **kwargs: tensors_out(function(*args, **kwargs))
