"""The operators of one run, which run again into the recorded memory.

The tape is what a CUDA graph is on a GPU: the same operators, in the same order, on the same addresses, without the
body's Python. Each operator is written down in the fastest form that was proven, on the recorded inputs, to give the
same bits as the operator did: a Python binding with ``out=``, else the operator followed by a copy. Views are not
replayed; a register is a tensor over fixed memory, so that its views are fixed too. The calls themselves are made in C
(``native/tape.c``).

Invariant: a step writes the memory that the operator wrote while recording, and no other. ``out=`` forms of some
operators take another kernel or resize what they are given; so each is tried on the recorded inputs before it is
trusted (``prove_out``), and what gives other bits is not used. Without the proof a replay could differ from eager where
nobody looks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

import torch
from attrs import evolve, field

from capture.core.data import define, frozen
from capture.core.interrupts import is_interrupt, let_through
from capture.core.schedule import Schedule
from capture.engines.base import Block, BoundInput, Geometry, Move, Number, OwnedOutput, Refusal, on_storage, views_of
from capture.engines.cpu.arena import Arena
from capture.engines.cpu.in_place import InPlaceTrial
from capture.engines.cpu.number_tensors import NO_NUMBERS, with_tensors
from capture.engines.cpu.schedule import schedule
from capture.engines.staging import over
from capture.key.pytree import PLAIN_TYPES
from capture.key.tensor_meta import is_dense, same_bits, span_bytes
from capture.native import native
from capture.observe.operator_schema import OperatorTraits
from capture.state.call import Call
from capture.torch_private import capabilities, operators
from capture.torch_private.warned import warned

PROOFS = 2
"""After a form held for so many steps that differ in values alone, it is trusted without another trial."""
ALIGNED = 64
"""Bytes. By an address modulo these a kernel may go another way."""
_address, _strided = torch.Tensor.data_ptr, torch.Tensor.as_strided
_begin_of, _nbytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes
"""torch's own methods: while a body is watched, others are in their place."""


@define(eq=False)
class TapeMemory:
    """Memory that registers look at: a block of the arena, a static tensor of the caller, or a constant."""

    kind: Literal["block", "beside", "static", "constant"]
    """``beside``: like a block, but not in the arena."""
    number: int
    storage: torch.UntypedStorage | None = None
    path: str = ""
    owner: torch.Tensor | None = None
    offset: int = 0
    """Storage offset of the owner when it was bound; the owner itself may have been given other memory since."""
    is_argument: bool = False
    is_kept: bool = False
    """An output or effect lies here, so results must be written to this very memory."""
    is_managed: bool = False
    """It is an output of an earlier recording."""
    is_grouped: bool = False
    """Other code than registers writes it, too."""
    is_owned: bool = False
    """Each call writes it into fresh memory (``make_owned``)."""
    is_uncounted: bool = False
    """The body writes it without autograd's noticing, see ``ObservedRun.uncounted_writes``."""
    is_given: bool = False
    """The fresh memory is the tensor that a step returns, so nothing has to be allocated before it."""
    registers: dict[Geometry, int] = field(factory=dict)

    def begin(self) -> int:
        """Address of the storage."""
        assert self.storage is not None
        return int(_begin_of(self.storage))

    @property
    def is_in_arena(self) -> bool:
        """Whether the tensor lies in the arena, where replays write."""
        return self.kind == "block" and not self.is_owned and not self.is_managed


@frozen
class Register:
    """A register in a step's arguments."""

    number: int


@frozen
class Leaf:
    """An argument of the present call among a step's arguments; None: all of them."""

    position: int | None


@define(eq=False)
class TapeStep:
    """One operator. ``form``: ``call`` writes by itself, ``out`` takes ``out=``, ``copy`` returns fresh tensors."""

    function: Callable[..., Any] | str
    """A function, or the name of a method of the first argument."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Several steps have one and the same, where it is empty."""
    form: Literal["call", "out", "copy", "break"]
    outs: list[tuple[TapeMemory, int] | None] = field(factory=list)
    """Per result of the operator, where it goes; None for a result that is not a fresh tensor."""
    single: bool = True
    """The operator returns one tensor, not a sequence."""
    name: str = ""
    """Name of the operator."""
    acts: bool = False
    """It writes, draws, or has unknown effects, so that a caller can tell that it ran."""
    writes: tuple[int, ...] = ()
    """Registers among its arguments that it writes."""
    order: Literal["", "draws", "barrier"] = ""
    """Order besides its reads and writes: after others that draw, or with respect to all operators."""
    numbers: Mapping[int, torch.Tensor] = NO_NUMBERS
    """Stand for the numbers at these positions, of which torch would make such tensors in each call."""
    is_whole: bool = False
    """What the operator gave owned its memory, and all of it."""


@define(eq=False)
class Ran:
    """One thing that the body did while it was recorded: an operator, or a read by the host without an operator."""

    op: Any
    """The operator; for a read its name."""
    step: TapeStep | None = None
    """The step that does it on the tape; None for views and the like."""
    result: Any = None
    """Its result in the form of ``answers.form_of``; for a read the value."""


@frozen(eq=False)
class Stop:
    """The place where a replay was stopped."""

    ran: Sequence[Ran]
    """What the body did while it was recorded, in order."""
    step: TapeStep
    """The step that raised."""
    error: BaseException
    registers: Sequence[Any]
    fresh: dict[int, torch.Tensor | None]
    """Registers whose memory is new in each call, or that were not written (None)."""


class Tape:
    """Written by a recorder, then ``compile`` d once."""

    __slots__ = ("__dict__", "__weakref__", "replay")  # the C module reads ``replay`` in every call

    rebinds_tensors = True

    def __init__(self, arena: Arena, proofs: dict[Any, list[bool]] | None = None) -> None:
        """``proofs``: what became of steps of other tapes in the same modes, where it is known."""
        self.arena = arena
        self._roots: list[TapeMemory] = []
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], TapeMemory]] = {}
        self._steps: list[TapeStep] = []
        self._geometries: list[tuple[TapeMemory, Geometry]] = []
        """The geometry of each register, while the tape is written."""
        self._is_compiled = False
        self._kind: tuple[TapeStep, Any, Any] | None = None
        """What ``_kind_of`` found last."""
        self.given_numbers: dict[Any, torch.Tensor] = {}
        """Tensors that stand for numbers, while the tape is written: see ``number_tensors``."""
        self._proofs: dict[Any, list[bool]] = {} if proofs is None else proofs
        """Which forms held for steps that do the same on other memory, see ``_kind_of``."""
        self.ran: list[Ran] = []
        """What the body did while it was recorded, in order."""
        self.has_collectives = False
        self._stopped: tuple[int, tuple[Any, ...], tuple[Any, ...]] | None = None
        """Where the last replay was ended by an operator, with what was left in ``_locals`` and owned registers."""
        self._locals: dict[int, int] = {}
        """Registers that exist only during a replay, by number: their positions among the values that the replay
        keeps."""
        self._read_numbers: tuple[int, ...] = ()
        """Numbers of no registers: locals that hold what the host reads in the middle. The first read has -1."""
        self.read_values: list[Any] | None = None
        """Where a replay leaves that."""
        self._views: tuple[Any, ...] = ()
        """Steps before all others: views of owned outputs, which go into locals."""
        self._read: tuple[int, ...] = ()
        """Registers that steps read."""
        self._direct: dict[int, int] = {}
        """Registers that are an argument of the call under way, by number: its position."""
        self.registers: list[Any] = []
        self.lifted: dict[int, Number] = {}
        """Registers that are numbers, with what those were when this was recorded."""
        self.generators: dict[int, torch.Generator] = {}
        """The generators among the leaves of the recorded call, by position."""
        self.num_ops = self.copied_inside = 0
        self.graph_bytes = 0
        self.order = ""
        self.reads: tuple[str, ...] = ()
        self.copied_paths: frozenset[str] = frozenset()
        self.copies_in: list[TapeStep] = []
        self.copies_out: list[TapeStep] = []
        self._calls: tuple[Any, ...] = ()
        """The steps as the C module takes them."""
        self._grad: Any = None
        self._bound: list[tuple[BoundInput, TapeMemory]] = []
        self._owned: tuple[OwnedOutput, ...] = ()
        self._owned_registers: tuple[int, ...] = ()
        """Registers that C fills anew in each replay."""
        self._left_shared: dict[int, torch.Tensor | None] = {}
        """Further registers that are filled anew, as a stopped replay left them."""
        self._native: Any = None
        self.replay: Callable[[Sequence[Any]], None] = _released

    def add_block(self, block: Block, visible: torch.UntypedStorage) -> TapeMemory:
        """A root over a block; ``visible`` is the storage that the body sees there."""
        root = TapeMemory("block", len(self._roots), storage=self.arena.storage(block))
        return self._add(root, visible)

    def add_static(self, path: str, owner: torch.Tensor, seen: torch.UntypedStorage | None = None) -> TapeMemory:
        """A root over memory of the caller; of an argument, which the body sees through the storage ``seen``."""
        root = TapeMemory("static", len(self._roots), path=path, owner=owner, offset=int(owner.storage_offset()))
        root.is_argument = seen is not None
        return self._add(root, owner.untyped_storage() if seen is None else seen)

    def leave_uncounted(self, storages: Set[int]) -> None:
        """Before ``compile``: static memory on these storages, by ``id``, is written without counting it."""
        for key, (seen, root) in self._by_storage.items():
            root.is_uncounted = key in storages and seen() is not None and root.kind == "static"

    def name_owner(self, path: str, owner: torch.Tensor) -> None:
        """Name the owner by which a static root is bound anew when its tensor moves."""
        root = self.root_of(owner)
        if root is not None and root.kind == "static":
            root.path, root.owner, root.offset = path, owner, int(owner.storage_offset())

    def add_constant(self, tensor: torch.Tensor) -> TapeMemory:
        """A root over a private copy of a constant's memory."""
        root = TapeMemory("constant", len(self._roots), storage=tensor.untyped_storage().clone())
        return self._add(root, tensor.untyped_storage())

    def _add(self, root: TapeMemory, visible: torch.UntypedStorage) -> TapeMemory:
        self._roots.append(root)
        self._by_storage[id(visible)] = (weakref.ref(visible), root)
        return root

    def root_of(self, tensor: torch.Tensor) -> TapeMemory | None:
        """The root a tensor of the body lies on."""
        storage = tensor.untyped_storage()
        found = self._by_storage.get(id(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def register(self, tensor: torch.Tensor) -> int | None:
        """Number of the register that looks at the same memory as this tensor; None for unknown memory."""
        root = self.root_of(tensor)
        if root is None or tensor.is_neg():
            return None
        geometry = Geometry.of(tensor)
        number = root.registers.get(geometry)
        if number is None:
            number = root.registers[geometry] = len(self.registers)
            self.registers.append(None)
            self._geometries.append((root, geometry))
        return number

    def tensor(self, number: int) -> torch.Tensor:
        """The register, while the tape is written: few are looked at then, and ``compile`` makes all of them anew."""
        if self.registers[number] is None:
            self.registers[number] = _view_of(*self._geometries[number])
        tensor: torch.Tensor = self.registers[number]
        return tensor

    def value(self, template: Any) -> Any:
        """Replace registers in a template by their tensors, and leaves by their generators."""
        if isinstance(template, Register):
            return self.registers[template.number] if self._is_compiled else self.tensor(template.number)
        if isinstance(template, Leaf):
            assert template.position is not None
            return self.generators[template.position]
        if isinstance(template, (list, tuple)):
            return type(template)([self.value(member) for member in template])
        return template

    @property
    def steps(self) -> Sequence[TapeStep]:
        """All operators, in order."""
        return self._steps

    @property
    def roots(self) -> Sequence[TapeMemory]:
        """All memory that registers look at."""
        return self._roots

    def lift(self, places: Mapping[int, Mapping[int | str, int]], values: Sequence[Number]) -> list[int]:
        """Numbers among the arguments of operators become registers, which are given back in the order of ``values``.
        ``places``: by ``id`` of a step, which of its arguments are which of them."""
        first = len(self.registers)
        self.registers += values
        self.lifted = {first + number: value for number, value in enumerate(values)}
        for step in self._steps:
            for place, number in places.get(id(step), {}).items():
                if isinstance(place, str):
                    step.kwargs[place] = Register(first + number)
                else:
                    step.args = (*step.args[:place], Register(first + number), *step.args[place + 1 :])
        self._write()
        return [first + number for number in range(len(values))]

    def append(self, step: TapeStep) -> None:
        """Append a step."""
        self._steps.append(step)
        self.num_ops += 1

    def last_step(self) -> TapeStep:
        """The step that was appended last."""
        return self._steps[-1]

    def prove_out(self, function: Callable[..., Any], step: TapeStep, results: list[torch.Tensor]) -> bool:
        """Run ``function`` with ``out=`` into the step's registers; True if it gave the bits of ``results``."""
        return self._tried(self._gives_out, function, step, results)

    def prove(self, function: Callable[..., Any], step: TapeStep, results: list[torch.Tensor]) -> bool:
        """Run ``function`` like the operator; True if it gave the bits of ``results`` in as many tensors."""
        return self._tried(self._gives, function, step, results)

    def is_undecided(self, function: Callable[..., Any], step: TapeStep) -> bool:
        """Whether ``function`` does in place what the operator does has to be tried, on copies made before."""
        verdicts = self._in_place_verdicts(function, step)
        return all(verdicts) and len(verdicts) < PROOFS

    def prove_in_place(self, function: Callable[..., Any], step: TapeStep, trial: InPlaceTrial | None) -> bool:
        """Whether ``function`` does in place what the operator does. ``trial``: None where nothing could be tried."""
        verdicts = self._in_place_verdicts(function, step)
        if trial is not None:
            verdicts.append(trial.holds())
        return bool(verdicts) and all(verdicts)

    def _in_place_verdicts(self, function: Callable[..., Any], step: TapeStep) -> list[bool]:
        kind = self._kind_of(step)
        return [] if kind is None else self._proofs.setdefault(("in place", function, *step.numbers, kind), [])

    def _tried(
        self, gives: Callable[..., bool], function: Callable[..., Any], step: TapeStep, results: list[torch.Tensor]
    ) -> bool:
        """Whether a form held, if that is known: layers of a model do the same many times, so what failed once, or held
        on ``PROOFS`` values, is not tried again."""
        kind = self._kind_of(step)
        key = gives.__name__, function, *step.numbers, kind
        verdicts = [] if kind is None else self._proofs.setdefault(key, [])
        if not all(verdicts) or len(verdicts) >= PROOFS:
            return all(verdicts)
        verdicts.append(gives(function, step, results))
        return verdicts[-1]

    def _kind_of(self, step: TapeStep) -> Any:
        """Equal for steps of which a kernel cannot tell one from another but by values: the same numbers, forms and
        alignment of tensors, and the same of them in one memory. None: it has other arguments."""
        known = self._kind  # several forms of one step are tried in turn
        if known is None or known[0] is not step or known[1] is not step.outs:
            self._kind = known = step, step.outs, self._kind_of_arguments(step)
        return known[2]

    def _kind_of_arguments(self, step: TapeStep) -> Any:
        memories: dict[int, tuple[int, int]] = {}
        try:
            told = [self._kind_of_value(memories, value) for value in step.args]
            told += [self._kind_of_register(memories, out[1]) for out in step.outs if out is not None]
            return *told, *[(name, self._kind_of_value(memories, value)) for name, value in step.kwargs.items()]
        except LookupError:
            return None

    def _kind_of_value(self, memories: dict[int, tuple[int, int]], value: Any) -> Any:
        # no function inside of the other one: a function that calls itself keeps the tape until a garbage collection
        kind = type(value)
        if kind is Register:
            return self._kind_of_register(memories, value.number)
        if kind in PLAIN_TYPES:
            return kind, repr(value)
        if isinstance(value, (list, tuple)):
            return tuple([self._kind_of_value(memories, member) for member in value])
        raise LookupError

    def _kind_of_register(self, memories: dict[int, tuple[int, int]], number: int) -> Any:
        root, geometry = self._geometries[number]
        if root.kind == "block":
            at = root.begin() + geometry.offset * geometry.dtype.itemsize
        else:
            at = _address(self.tensor(number))
        memory, begin = memories.setdefault(id(root), (len(memories), geometry.offset))
        metadata = geometry.dtype, geometry.shape, geometry.stride, geometry.conj
        return metadata, at % ALIGNED, memory, geometry.offset - begin

    def _gives_out(self, function: Callable[..., Any], step: TapeStep, results: list[torch.Tensor]) -> bool:
        # tensors of its own: an operator that wants a larger result leaves it with that shape, on the memory of the
        # smaller one, and whoever writes it then writes beyond its block
        outs = [_view_of(*self._geometries[out[1]]) for out in step.outs if out is not None]
        for out in outs:
            _fill(out)
        sources = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        try:
            with torch.no_grad():
                args = self.value(with_tensors(step.args, step.numbers))
                kwargs = {key: self.value(v) for key, v in step.kwargs.items()}
                _, objected = warned(function, *args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))
        except Exception as error:  # any error means that this form is not used
            if is_interrupt(error):
                raise
            return False
        kept = not objected and sources == [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        return kept and all(same_bits(out, result) for out, result in zip(outs, results, strict=True))

    def _gives(self, function: Callable[..., Any], step: TapeStep, results: list[torch.Tensor]) -> bool:
        try:
            with torch.no_grad():
                args, kwargs = self.value(step.args), {key: self.value(v) for key, v in step.kwargs.items()}
                outs, objected = warned(function, *args, **kwargs)
        except Exception as error:  # any error means that this form is not used
            if is_interrupt(error):
                raise
            return False
        if objected or step.single is not isinstance(outs, torch.Tensor):
            return False
        outs = [outs] if step.single else list(outs)
        same = len(outs) == len(results) and all(isinstance(out, torch.Tensor) for out in outs)
        return same and all(
            out.stride() == result.stride() and same_bits(out, result)
            for out, result in zip(outs, results, strict=True)
        )

    def compile(
        self, copies_in: list[TapeStep], copies_out: list[TapeStep], readable: Mapping[int, int] | None = None
    ) -> None:  # fmt: skip
        """Make the replay. The steps given run before and after the operators. ``readable``: registers that one of
        ``copies_in`` fills, and the arguments, by position, that may be read in their place if nothing writes there.

        Registers are made anew, since those made under a dispatch mode do not share their owner's version counter, and
        those made inside ``inference_mode`` could not be written outside of it.
        """
        for root in self._roots:
            for geometry, number in root.registers.items():
                self.registers[number] = _view_of(root, geometry)
        self._geometries, self._proofs, self._kind, self._is_compiled = [], {}, None, True
        self._by_storage, self.given_numbers = {}, {}
        self._direct = self._read_alone(readable or {})
        self.copies_in = [step for step in copies_in if self._direct.keys().isdisjoint(registers_in(step.args))]
        self.copies_out = copies_out
        # the body needed no gradient, yet operators with out= would refuse parameters
        self._grad = capabilities.set_grad_enabled if torch.is_grad_enabled() else None
        self._write_later()

    def _write(self) -> None:
        """Write the calls for the C module, and make the replay of them."""
        self._write_calls()
        self.replay = self._make_replay()
        if not self._keeps_calls:
            self._calls = ()  # they take as much memory as the steps

    @property
    def _keeps_calls(self) -> bool:
        """Whether parts of the replay are made of them again."""
        return False

    def _write_later(self) -> None:
        """Write them for the first replay: most tapes are given their own outputs before, and are written then."""
        self._calls = ()
        self.replay = self._written_now

    def _written_now(self, leaves: Sequence[Any]) -> None:
        if not self._is_written():
            self._write()
        self.replay(leaves)

    def _is_written(self) -> bool:
        return self.replay != self._written_now

    def _read_alone(self, readable: Mapping[int, int]) -> dict[int, int]:
        """The registers among ``readable`` that steps read as a whole and that nothing else uses. The tape may read the
        caller's tensor itself there, as eager code does, and needs no copy."""
        written = {number for step in self._steps for number in step.writes}
        written.update(out[1] for step in self._steps for out in step.outs if out is not None)
        alone = {number for root in self._roots if root.is_in_arena and not (root.is_kept or root.is_grouped)
                 for number in root.registers.values() if len(root.registers) == 1}  # fmt: skip
        return {number: position for number, position in readable.items() if number in alone - written}

    def _write_calls(self) -> None:
        numbers = (number for step in self._steps for number in registers_in((step.args, step.kwargs)))
        self._read = tuple(dict.fromkeys(numbers))  # a set takes ten times the memory, and each recording keeps one
        used = self._used()
        fresh = [out for step in self._steps if step.form == "copy" for out in step.outs if out is not None]
        alone = [number for root, number in fresh if number in used and self._is_local(root, number)]
        self._locals = {number: place for place, number in enumerate([*alone, *self._read_numbers])}
        self._add_views()

    def _is_local(self, root: TapeMemory, number: int) -> bool:
        """Whether steps read this register, and nothing else looks at its memory."""
        return (root.is_given or not root.is_kept) and list(root.registers.values()) == [number]

    def _all_calls(self) -> tuple[Any, ...]:
        used = self._used()
        return tuple(self._call(step, used) for step in [*self.copies_in, *self._steps, *self.copies_out])

    def _owned_parts(self) -> tuple[tuple[Any, ...], tuple[Any, ...], list[tuple[OwnedOutput, TapeMemory]]]:
        """For the C module: registers that it makes anew in each replay, and locals that it leaves to others. Besides,
        outputs that are made anew in Python."""
        plain: list[tuple[OwnedOutput, TapeMemory]] = []
        shared: list[tuple[OwnedOutput, TapeMemory]] = []
        for output in self._owned:
            root = self._kept_root(output.block)
            (plain if self._is_in_c(output, root) else shared).append((output, root))
        numbered = [(root.registers[output.geometries[0]], output, root) for output, root in plain]
        owned = tuple(
            (number, _maker(output.geometries[0]), output.places, output.number)
            for number, output, root in numbered if not root.is_given
        )  # fmt: skip
        given = tuple(
            (self._locals[number], places_of_root.places, places_of_root.number)
            for number, places_of_root, root in numbered
            if root.is_given
        ) + tuple((self._locals[number], self.read_values, -1 - number) for number in self._read_numbers)
        self._owned_registers = tuple([number for number, *_ in owned])
        return owned, given, shared

    def _make_replay(self) -> Callable[[Sequence[Any]], None]:
        owned, given, shared = self._owned_parts()
        acting = (number for number, step in enumerate(self._steps) if step.acts)
        self._native = native.Tape(
            self.registers, (*self._views, *self._calls), self._grad, owned, given,
            acts=len(self._views) + len(self.copies_in) + next(acting, len(self._steps)), back=len(self.copies_out),
        )  # fmt: skip
        replay: Callable[[Sequence[Any]], None] = self._native
        replay = self._with_shared(replay, shared) if shared else replay
        return self._with_bound(replay) if self._bound else replay

    def _with_shared(
        self, plain: Callable[[Sequence[Any]], None], shared: Sequence[tuple[OwnedOutput, TapeMemory]]
    ) -> Callable[[Sequence[Any]], None]:
        """Outputs of several tensors, or that views of other kinds look at."""
        sizes = [storage.block.nbytes for storage, _ in shared]
        make = functools.partial(torch.UntypedStorage, device="cpu")

        def replay(leaves: Sequence[Any]) -> None:
            storages = list(map(make, sizes))

            def run() -> None:
                for storage, (_, root) in zip(storages, shared, strict=True):
                    for geometry, number in root.registers.items():
                        self.registers[number] = over(storage, geometry)
                native.committed(plain, (leaves,), bool)

            def finish(ended: bool) -> None:
                numbers = [number for _, root in shared for number in root.registers.values()]
                if not ended:
                    self._left_shared = {number: self.registers[number] for number in numbers}
                for number in numbers:
                    self.registers[number] = None
                if not ended:
                    return
                with torch.no_grad():
                    for storage, (output, _) in zip(storages, shared, strict=True):
                        first = over(storage, output.geometries[0])
                        made = on_storage(storage, [first, *views_of(first, output.geometries[1:])])
                        output.places[output.number] = made if len(made) > 1 else made[0]

            native.committed(run, (), finish)

        return replay

    def is_in(self, root: TapeMemory, block: Block) -> bool:
        """Whether replays write there."""
        return root.is_in_arena and _overlaps(root, block)

    def make_owned(self, outputs: Sequence[OwnedOutput]) -> Callable[[], None] | None:
        """Every replay writes where its caller's tensors are made."""
        self._owned = tuple(outputs)
        roots = [self._kept_root(output.block) for output in outputs]
        for output, root in zip(outputs, roots, strict=True):
            root.is_owned = True
            if output.geometries[0] not in root.registers:  # no step reads the output itself
                self.registers.append(None)
                root.registers[output.geometries[0]] = len(self.registers) - 1
        alone = [root for output, root in zip(outputs, roots, strict=True) if self._is_in_c(output, root)]
        self._find_given([root for root in alone if len(root.registers) == 1])
        self._write()
        for number in [number for root in roots for number in root.registers.values()]:
            self.registers[number] = None  # last: the replay before needs them
        return None

    def _find_given(self, roots: Sequence[TapeMemory]) -> None:
        """Outputs that are what a step gives as it stands, so that nothing has to be made before it and no version has
        to be hidden after it. All that this step gives has to be left where it is."""
        written = {number for step in self._steps for number in step.writes}
        wanted = {id(root) for root in roots}
        for step in self._steps:
            outs = [out for out in step.outs if out is not None]
            mine = [root for root, _ in outs if id(root) in wanted]
            if not mine or step.form not in ("out", "copy") or not written.isdisjoint(number for _, number in outs):
                continue
            others = [root for root, _ in outs if id(root) not in wanted]
            free = all(len(root.registers) == 1 and not root.is_kept for root in others)
            if free and self._gives_plainly(step, outs):
                step.form = "copy"
                for root in mine:
                    root.is_given = True

    def _gives_plainly(self, step: TapeStep, outs: Sequence[tuple[TapeMemory, int]]) -> bool:
        """Whether it gives without ``out=`` the bits that it writes there, in tensors that own their memory. Tried on
        what its registers hold now."""
        if len(outs) < len(step.outs) or isinstance(step.function, str):
            return False
        if step.acts:
            return step.order == "draws" and step.is_whole and not step.writes
        geometries = [next(iter(root.registers)) for root, _ in outs]
        try:
            with torch.no_grad():
                args = self.value(with_tensors(step.args, step.numbers))
                kwargs = {key: self.value(v) for key, v in step.kwargs.items()}
                if not _have_memory([*args, *kwargs.values()]):
                    return False
                written = [
                    torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype)
                    for geometry in geometries
                ]
                into = {"out": written[0] if step.single else tuple(written)} if step.form == "out" else {}
                first, objected = warned(step.function, *args, **kwargs, **into)
                given, objects = warned(step.function, *args, **kwargs)
        except Exception as error:  # any objection means that this form is not used
            if is_interrupt(error):
                raise
            return False
        kind = torch.Tensor if step.single else (tuple, list)  # some that write to ``out`` give nothing
        if objected or objects or not (isinstance(first, kind) and isinstance(given, kind)):
            return False
        both = [[outs] if step.single else list(outs) for outs in (first, given)]
        storages = {id(register.untyped_storage()) for register in self.registers if isinstance(register, torch.Tensor)}
        return len(both[1]) == len(geometries) and all(
            is_whole(again)
            and id(again.untyped_storage()) not in storages
            and same_bits(result, again)
            and Geometry.of(again) == evolve(geometry, offset=0)
            for result, again, geometry in zip(*both, geometries, strict=True)
        )

    def _add_views(self) -> None:
        """All calls. Views of outputs that have fresh memory in every call are made before the others."""
        views: list[Any] = []
        looked_at = {out[1] for step in self._steps if step.form == "out" for out in step.outs if out is not None}
        looked_at.update(self._read if self._owned else ())
        for output in self._owned:
            root = self._kept_root(output.block)
            if root.is_given or not self._is_in_c(output, root):
                continue
            base = root.registers[output.geometries[0]]
            for geometry, number in root.registers.items():
                if number != base and number in looked_at:
                    place = self._locals.setdefault(number, len(self._locals))
                    arguments = [("constant", part) for part in (geometry.shape, geometry.stride, geometry.offset)]
                    step = (("register", base), *arguments), (), (("local", place),), True
                    views.append((torch.as_strided, *step))
        self._views, self._calls = tuple(views), self._all_calls()

    def _is_in_c(self, output: OwnedOutput, root: TapeMemory) -> bool:
        """Whether the C module makes the output and all views of it that steps look at."""
        first = output.geometries[0]
        if not _is_plain(output):
            return False
        others = {number for geometry, number in root.registers.items() if geometry != first}
        if others and math.prod(first.shape) * first.dtype.itemsize != output.block.nbytes:
            return False  # the output is a part of a step's result
        copied = {out[1] for step in self._steps if step.form == "copy" for out in step.outs if out is not None}
        alike = all(register.dtype is first.dtype and not register.conj for register in root.registers)
        return alike and (others.isdisjoint(copied) if others else True)

    def _kept_root(self, block: Block) -> TapeMemory:
        return next(root for root in self._roots if root.is_kept and root.begin() == block.address)

    def avoid(self, block: Block) -> bool:
        """Give intermediate results and copies of inputs that lie there memory of their own."""
        there = [root for root in self._roots if self.is_in(root, block)]
        if any(root.is_kept or root.is_grouped for root in there):
            return False
        for root in there:
            assert root.storage is not None
            storage = torch.UntypedStorage(root.storage.nbytes(), device="cpu")
            for geometry, number in root.registers.items():
                self.registers[number] = over(storage, geometry)
            root.storage, root.kind = storage, "beside"  # last, so that an interrupted call begins anew
        return True

    def schedule(self) -> Schedule:
        """Which operators need the results of which others."""
        memory_of = [0] * len(self.registers)
        for place, root in enumerate(self._roots):
            for number in root.registers.values():
                memory_of[number] = place
        return schedule(self._steps, memory_of, registers_in)

    def was_stopped(self) -> bool:
        """Whether an operator raised in the last replay."""
        return self._native is not None and self._look_at(self._native, 0)

    def _look_at(self, replay: Any, begin: int) -> bool:
        """Take over where this part of the tape, which begins at that step, was stopped. False if it was not."""
        if replay.stopped < 0:
            return False
        self._stopped = begin + replay.stopped, *(replay.left or ((), ()))
        replay.stopped, replay.left = -1, None  # the next replay may be stopped before it begins
        return True

    def answers(self, error: BaseException, leaves: Sequence[Any]) -> Any:
        """See ``Recording``; a tape with breaks knows how."""
        del error, leaves

    def stop(self, error: BaseException) -> Stop | None:
        """Where the last replay was stopped; None if that was before the body's first operator, or is not known."""
        stopped, self._stopped = self._stopped, None
        if stopped is None or self.has_collectives:
            return None
        at, locals_, owned = stopped
        at, steps = at - len(self._views), [*self.copies_in, *self._steps]
        if not len(self.copies_in) <= at < len(steps):
            return None
        dropped = [out[1] for step in self._steps if step.form == "copy" for out in step.outs if out is not None]
        used = self._used()
        fresh: dict[int, torch.Tensor | None] = {number: None for number in dropped if number not in used}
        fresh.update({number: locals_[place] for number, place in self._locals.items() if place < len(locals_)})
        fresh.update(zip(self._owned_registers, owned, strict=False))
        fresh.update(self._left_shared)
        self._left_shared.clear()
        return Stop(self.ran, steps[at], error, self.registers, fresh)

    def rebind(self, moves: Sequence[Move]) -> bool:
        """Look at other tensors of the same metadata under the same paths."""
        tensors = {move.path: move.tensor for move in moves}
        for root in self._roots:
            if root.kind == "static" and root.path in tensors and root.owner is not None:
                self._point_at(root, tensors[root.path])
        return True

    def _point_at(self, root: TapeMemory, tensor: torch.Tensor, *, once: bool = False) -> None:
        """Another tensor of the same metadata is the owner from now on, or in this call alone."""
        shift = int(tensor.storage_offset()) - root.offset
        registers: dict[Geometry, int] = {}
        root.owner = tensor
        for old, number in root.registers.items():
            geometry = evolve(old, offset=old.offset + shift)
            registers[geometry] = number
            self.registers[number] = _view_of(root, geometry, is_current=once)
        root.registers, root.offset = registers, root.offset + shift  # last, so that an interrupted call begins anew

    def bind_inputs(self, inputs: Sequence[BoundInput]) -> frozenset[str]:
        """Bind all of them, and give all paths. A tape keeps no reference to the arguments between calls."""
        roots = {root.path: root for root in self._roots if root.is_argument}
        self._bound += [(input_, roots[input_.path]) for input_ in inputs if input_.path in roots]
        if self._is_written():
            self._write()
        return frozenset(one.path for one, _ in self._bound)

    def _with_bound(self, plain: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
        taken = self._bound

        def bound(leaves: Sequence[Any]) -> None:
            beside: list[tuple[torch.Tensor, torch.Tensor]] = []

            def run() -> None:
                for bound_input, root in taken:
                    tensor = leaf = leaves[bound_input.position]
                    if self.arena.find(leaf.data_ptr()):
                        with torch.no_grad():
                            tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).copy_(leaf)
                        beside.extend([(leaf, tensor)] if bound_input.is_written else [])
                    self._point_at(root, tensor, once=True)
                native.committed(plain, (leaves,), bring_back)

            def bring_back(_: bool) -> None:
                with torch.no_grad():
                    for leaf, tensor in beside:
                        leaf.copy_(tensor)

            def release(_: bool) -> None:
                for _input, root in taken:
                    root.owner = None
                    for number in root.registers.values():
                        self.registers[number] = None

            native.committed(run, (), release)

        return bound

    def learn(
        self, call: Call, moves: Sequence[Move], others: Sequence[Move], generators: Sequence[torch.Generator]
    ) -> Refusal | None:
        """Nothing to find out: the tape looks at tensors, not at addresses."""
        del call, moves, others, generators
        return None

    def leaves_alone(self, moves: Sequence[Move]) -> frozenset[str]:
        """Nobody asks: each tensor is read where it is."""
        del moves
        return frozenset()

    def kernels_using(self, paths: Sequence[str]) -> list[str]:
        """Operators need no names here: no rebind of a tape is refused."""
        del paths
        return []

    def release(self) -> None:
        """Drop all references to memory."""
        self.replay = _released
        self.registers[:] = [None] * len(self.registers)  # so that a running replay sees that they are gone
        self.generators.clear()
        self._roots.clear()
        self._steps.clear()
        self.ran.clear()
        self._stopped = None
        self._left_shared.clear()
        self._calls, self._owned = (), ()
        self._bound.clear()
        self.copies_in, self.copies_out = [], []
        self._by_storage.clear()

    def _call(self, step: TapeStep, used: Set[int]) -> tuple[Any, ...]:
        """The step as the C module takes it: function, arguments, names of the last ones, results, one or several."""
        given = with_tensors(step.args, step.numbers)
        arguments = [self._encoded(value) for value in (*given, *step.kwargs.values())]
        names = [*step.kwargs]
        if step.form == "out":
            outs = [self._place(out[1]) for out in step.outs if out is not None]
            arguments.append(outs[0] if len(outs) == 1 else ("tuple", tuple(outs)))
            names.append("out")
        targets: list[tuple[str, Any]] = []
        if step.form == "copy":  # into their registers; one that nothing looks at otherwise stays as it is
            dropped = [out is None or out[1] not in used for out in step.outs]
            if not all(dropped):
                targets = [
                    ("nothing", None) if out is None or is_dropped else self._place(out[1])
                    for out, is_dropped in zip(step.outs, dropped, strict=True)
                ]
        return step.function, tuple(arguments), tuple(names), tuple(targets), step.single or not targets

    def _used(self) -> set[int]:
        """Registers that are read once they are written."""
        found = set(self._read)
        for root in self._roots:
            if root.is_kept or len(root.registers) > 1:
                found.update(root.registers.values())
        return found

    def _encoded(self, value: Any) -> tuple[str, Any]:
        kind = type(value)
        if kind is Register:
            return self._place(value.number)
        if kind in PLAIN_TYPES:
            return "constant", value
        if kind is Leaf:
            return ("leaves", None) if value.position is None else ("leaf", value.position)
        if isinstance(value, (list, tuple)) and _places(value):
            return "list", tuple(self._encoded(member) for member in value)
        return "constant", value

    def _place(self, number: int) -> tuple[str, Any]:
        """Where C finds what this register has."""
        if number in self._direct:
            return "leaf", self._direct[number]
        place = self._locals.get(number)
        return ("register", number) if place is None else ("local", place)


def _have_memory(values: Sequence[Any]) -> bool:
    """Whether the tensors among these have all their memory: the caller of the last call may have freed an argument's
    storage since (``untyped_storage().resize_(0)``), and an operator would read beyond its end."""
    for value in values:
        if isinstance(value, (list, tuple)):
            if not _have_memory(value):
                return False
        elif isinstance(value, torch.Tensor):
            begin = value.storage_offset() * value.element_size()
            if value.untyped_storage().nbytes() < begin + span_bytes(value):
                return False
    return True


def _released(leaves: Sequence[Any]) -> None:
    raise RuntimeError("this recording was released")


def _overlaps(root: TapeMemory, block: Block) -> bool:
    assert root.storage is not None
    return Block(root.begin(), root.storage.nbytes()).overlaps(block)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers the whole of its storage, in order."""
    return bool(tensor.numel() * tensor.element_size() == _nbytes(tensor.untyped_storage()))


def _is_plain(output: OwnedOutput) -> bool:
    """Whether it is a single tensor as an allocation makes it."""
    (geometry, *others) = output.geometries
    return not others and not geometry.conj and not geometry.offset and is_dense(geometry.shape, geometry.stride)


def _maker(geometry: Geometry) -> Callable[[], torch.Tensor]:
    return capabilities.empty_maker("cpu", geometry.shape, geometry.stride, geometry.dtype)


def _places(template: Any) -> list[Register | Leaf]:
    kind = type(template)
    if kind is Register or kind is Leaf:
        return [template]
    found: list[Register | Leaf] = []
    members = template.values() if kind is dict else template if isinstance(template, (list, tuple)) else ()
    for member in members:
        kind = type(member)
        if kind is Register or kind is Leaf:
            found.append(member)
        elif kind not in PLAIN_TYPES:
            found += _places(member)
    return found


def registers_in(template: Any) -> list[int]:
    """Numbers of the registers in a template."""
    return [place.number for place in _places(template) if type(place) is Register]


def _view_of(root: TapeMemory, geometry: Geometry, *, is_current: bool = False) -> torch.Tensor:
    """``is_current``: the owner is an argument of the call under way. That of an earlier one may change its shape or
    memory while other tensors lie where it was; tensors in Python state are checked before each replay."""
    if root.owner is None:
        assert root.storage is not None
        return over(root.storage, geometry)
    if root.is_uncounted:
        return over(root.owner.untyped_storage(), geometry)
    if Geometry.of(root.owner) == geometry and (is_current or not root.is_argument):
        return root.owner
    if geometry.dtype == root.owner.dtype:
        with torch.no_grad():  # a view shares the owner's version counter, so writes through it are noticed
            physical = root.owner.conj() if root.owner.is_conj() else root.owner
            view = _strided(physical, geometry.shape, geometry.stride, geometry.offset)
            return (view.conj() if geometry.conj else view).detach()  # a view of it keeps ``swap_tensors`` from it
    return _retyped(root.owner, geometry)


def _retyped(owner: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A look of another dtype, as a view where torch makes one, since those share the owner's version counter."""
    try:  # conjugates and what lies otherwise have no such view
        with torch.no_grad():
            parts = owner.is_complex() and geometry.dtype is owner.dtype.to_real()
            whole = torch.view_as_real(owner) if parts else owner.view(geometry.dtype)
            view = whole.as_strided(geometry.shape, geometry.stride, geometry.offset)
            return (view.conj() if geometry.conj else view).detach()
    except RuntimeError as error:
        let_through(error)
        return over(owner.untyped_storage(), geometry)


def _fill(tensor: torch.Tensor) -> None:
    if tensor.numel():
        storage = tensor.untyped_storage()
        whole = Geometry(dtype=torch.uint8, offset=0, shape=(storage.nbytes(),), stride=(1,))
        over(storage, whole).fill_(0xFF)


def python_form(known: OperatorTraits) -> Callable[..., Any] | None:
    """A Python binding that may do what the operator does. Used only where it can be run twice to prove it."""
    if known.namespace != "aten" or known.draws or known.writes or known.norm is not None:
        return None
    return operators.python_binding(known.base)
