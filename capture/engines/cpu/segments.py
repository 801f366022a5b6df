"""A tape with breaks: where the host read a value, or an operator asked for values to know how much to make.

Between two breaks lies a segment, a tape of its own. At a break the operator runs anew, as eager code runs it, on the
recorded memory; what it makes is copied to where the rest of the recording expects it, once that is known to be the
rest of this recording. Another recording of the same body may go on from there (``joins``): up to the break both did
the same with the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from attrs import evolve
from typing_extensions import override

from capture.core.data import define
from capture.core.interrupts import is_interrupt
from capture.engines.base import Block, BoundInput, Found, Geometry, IslandCall, Move, OwnedOutput, found, views_of
from capture.engines.copy_out import OutputCopies
from capture.engines.cpu.answers import Answers
from capture.engines.cpu.tape import Leaf, Register, Stop, Tape, TapeMemory, TapeStep, registers_in
from capture.engines.island_arguments import filled
from capture.engines.undo import KeptMemory, Places, Undo, kept_memory, places_of
from capture.native import native
from capture.observe.islands import Before, Place
from capture.observe.operator_schema import read_text
from capture.observe.returned_value import RETURNED
from capture.torch_private.capabilities import copy_all, generator_id

Key = tuple[Any, ...]
_READERS: Mapping[str, Callable[[torch.Tensor], Any]] = {"aten._local_scalar_dense.default": torch.Tensor.item}
"""Methods that read what an operator reads, in a fifth of the time."""
_NUMBERS = (bool, int, float)


@define(eq=False)
class _Written:
    """Memory outside of the arena that the segments before the last break change."""

    roots: Sequence[TapeMemory] = ()
    generators: Sequence[torch.Generator] = ()

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages that it lies on now."""
        found = [root.storage if root.owner is None else root.owner.untyped_storage() for root in self.roots]
        return [one for one in found if one is not None]


class SegmentedTape(Tape):
    """A tape that may have breaks; without any it is a plain one."""

    def __init__(self, arena: Any, proofs: dict[Any, list[bool]] | None = None) -> None:
        super().__init__(arena, proofs)
        self.staged: Key = ()
        """How the inputs reach the tape, in a form that can be compared."""
        self._segments: list[Any] = []
        self._breaks: list[TapeStep] = []
        self._meetings: list[Callable[[Sequence[Any]], Any]] = []
        """The operators of the breaks."""
        self._keys: list[Key] = []
        self._key_places: dict[int, Key] = {}
        """Memory and geometry of each register, in a form that can be compared."""
        self._written = _Written()
        self._written_at: list[_Written] = []
        """The same before each break."""
        self._kept: KeptMemory | None = None
        self._begins: list[int] = []
        """The first step of each segment."""
        self._returned: dict[int, Any] = {}
        """By number of a break, values that the body only returns, as they were read in the call that was stopped."""
        self._met: int | None = None
        """The break whose operator raised."""
        self._islands: dict[int, tuple[bool, tuple[Place, ...]]] = {}
        """Numbers of breaks that are islands, with the grad mode that they are called in, and the places that the body
        changed before. The step has the arguments, and what these places held."""
        self._places: dict[int, tuple[TapeMemory, Geometry]] = {}
        """Memory and geometry of each register, by its number."""
        self._builders: dict[int, tuple[Block, Callable[[], torch.Tensor]]] = {}
        """The tape's blocks, by their numbers, and what makes the first tensor that an island gets on each."""
        self._given_to: dict[int, list[tuple[TapeMemory, list[int]]]] = {}
        """By number of the break, the registers that an island gets."""
        self._expected: dict[int, Any] = {}
        """By number of a break, values that have to come again in a replay that runs in one go."""
        self._through: Any = None
        """The tape of such a replay, which goes on as far as they do."""
        self._keeps_first, self._num_keeps = False, 0
        """That tape begins with copies of what is written before a value that has to come again, by so many steps."""
        self._is_back = False
        """The stopped replay was one tape, which brought back what it had written to copies."""
        self._copies: tuple[list[TapeStep], list[TapeStep], Mapping[int, int] | None] = [], [], None
        """What ``compile`` got."""

    # ------------------------------------------------------------------------------------------------------ recording

    def end_segment(self, step: TapeStep, text: str, wrote: Iterable[int], drew: Iterable[torch.Generator]) -> None:
        """The operator that was appended last is a break, at which the host read this. ``wrote``: ``id`` of the
        storages, as the body sees them, that the run has written so far; ``drew``: what it has drawn from."""
        step.form = "break"
        self._breaks.append(step)
        self.reads += (text,)
        written_roots = [entry[1] for key in wrote if (entry := self._by_storage.get(key)) is not None]
        roots = [root for root in written_roots if root.kind == "static" or root.is_managed]
        self._written = _Written(roots, tuple(drew))
        self._written_at.append(self._written)

    def note_island(self, grad: bool, places: tuple[Place, ...]) -> None:
        """The last break is an island."""
        self._islands[len(self._breaks) - 1] = grad, places

    def undo_bytes(self) -> int:
        """Bytes of the caller's memory that every replay has to keep a copy of."""
        return sum(nbytes for _, nbytes in self.kept_places)

    @property
    def kept_places(self) -> Places:
        """See ``SegmentedRecording``."""
        return places_of(self._written.storages() if self._is_apart else ())

    @property
    @override
    def _keeps_calls(self) -> bool:
        return self._is_apart or self._keeps_first

    @property
    def _is_apart(self) -> bool:
        """It runs segment by segment."""
        return bool(self.reads) and (self.read_values is None or bool(self._expected))

    @override
    def compile(
        self, copies_in: list[TapeStep], copies_out: list[TapeStep], readable: Mapping[int, int] | None = None
    ) -> None:  # fmt: skip
        self._copies = copies_in, copies_out, readable
        # others may go on from what is copied
        super().compile(copies_in, copies_out, None if self._is_apart else readable)
        if self._is_apart:
            self._write()  # its segments are run from elsewhere
        if self._islands:
            self._places = {
                number: (root, geometry) for root in self._roots for geometry, number in root.registers.items()
            }
        if self._is_apart:
            places = {number: (_key_of_root(root), geometry)
                      for root in self._roots for geometry, number in root.registers.items()}  # fmt: skip
            self._keys, self._key_places = [_key_of_step(step, places) for step in self._steps], places

    @override
    def _is_local(self, root: TapeMemory, number: int) -> bool:
        may_be = root.is_given or not self._is_apart  # results are needed after their segment
        return may_be and super()._is_local(root, number)

    @override
    def _used(self) -> set[int]:
        """Another recording of the body, which goes on from a break of this one, may look at all that was made then."""
        return super()._used() | {out[1] for step in self._trunk_steps() for out in step.outs if out is not None}

    def _trunk_steps(self) -> Sequence[TapeStep]:
        """The steps up to the last break, after which another recording may go on."""
        ends = [at for at, step in enumerate(self._steps) if step.form == "break"] if self._is_apart else []
        return self._steps[: ends[-1] + 1] if ends else []

    @override
    def _make_replay(self) -> Callable[[Sequence[Any]], None]:
        if not self._is_apart:
            return super()._make_replay()
        calls, begin = list(self._calls), 0
        steps = [*self.copies_in, *self._steps, *self.copies_out]
        ends = [at for at, step in enumerate(steps) if step.form == "break"]
        self._segments, self._meetings = [], [self._meeting(step) for step in self._breaks]
        self._begins = [0, *[end + 1 for end in ends]]
        for end in ends:
            self._segments.append(native.Tape(self.registers, tuple(calls[begin:end]), None, ()))
            begin = end + 1
        (owned, given, _), back = self._owned_parts(), len(self.copies_out)
        left = given[: len(given) - len(self._read_numbers)]  # the last segment reads nothing
        self._native = native.Tape(self.registers, (*self._views, *calls[begin:]), None, owned, left, back=back)
        self._segments.append(self._native)
        return _in_segments if self.read_values is None else self._all_in_one(owned, given)

    def _all_in_one(self, owned: tuple[Any, ...], given: tuple[Any, ...]) -> Callable[[Sequence[Any]], None]:
        """The replay as one tape, which ends where it reads another value: the segments go on from there."""
        acting = next(number for number, step in enumerate(self._steps) if step.acts)  # a break does
        acts = len(self._views) + len(self.copies_in) + acting
        keeps, undo = self._copies_to_keep() if self._keeps_first else ((), ())
        steps, back = (*keeps, *self._views, *self._calls, *undo), len(self.copies_out)
        acts, self._num_keeps = acts + len(keeps), len(keeps)
        self._through = native.Tape(
            self.registers, steps, self._grad, owned, given, acts=acts, back=back, undo=len(undo)
        )  # fmt: skip
        replay: Callable[[Sequence[Any]], None] = self._through
        return replay

    def _copies_to_keep(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Steps that keep what the segments before the last break change, and others that put it back."""
        self._kept = kept_memory(self.arena, self._written.storages(), self._kept)
        copies = [] if self._kept is None else self._kept.copies()
        return tuple([_copying(ours, theirs) for ours, theirs in copies]), tuple(
            [_copying(theirs, ours) for ours, theirs in copies]
        )

    def put_back(self) -> None:
        """See ``SegmentedRecording``."""
        if self._through is not None:
            self._through.put_back()

    @override
    def rebind(self, moves: Sequence[Move]) -> bool:
        is_done = super().rebind(moves)
        if self._keeps_first and self._is_written():  # from where it is now
            self.replay = self._make_replay()
        return is_done

    def read_in_line(self) -> list[Any] | None:
        """See ``SegmentedRecording``. One tape reads in the middle, as no code of Python has to run there."""
        if self._islands or any(out is not None for step in self._breaks for out in step.outs):
            return None
        results = {id(one.step): one.result for one in self.ran if one.step is not None}
        numbers = [number for number, text in enumerate(self.reads) if text.startswith(RETURNED)]
        expected = {number: results.get(id(step)) for number, step in enumerate(self._breaks) if number not in numbers}
        is_known = all(
            type(value) in _NUMBERS and read_text(value) == self.reads[number] for number, value in expected.items()
        )
        changed = self._written_at[max(expected)] if expected else _Written()
        if not is_known or changed.generators:
            return None
        self._keeps_first = bool(changed.roots)
        self._read_numbers = tuple([-1 - number for number in numbers])
        self.read_values, self._expected = [None] * len(self._breaks), expected
        if expected:
            self._write()
        else:
            self.compile(*self._copies)
        return self.read_values

    @override
    def _call(self, step: TapeStep, used: Set[int]) -> tuple[Any, ...]:
        call = super()._call(step, used)
        if step.form != "break" or self.read_values is None:
            return call
        number = next(at for at, one in enumerate(self._breaks) if one is step)
        if number in self._expected:
            target: tuple[str, Any] = "expected", (number, self._expected[number])
        else:
            target = "local", self._locals[-1 - number]
        return _READERS.get(step.name, call[0]), call[1], call[2], (target,), True

    # ------------------------------------------------------------------------------------------------------- replaying

    def keep(self, undo: Undo, leaves: Sequence[Any], *, after_one_go: bool = False) -> None:
        """See ``SegmentedRecording``."""
        if after_one_go and self._keeps_first and self._kept is not None:
            undo.take(self._written.storages(), self._kept)
            self._through.parted = False  # last: until then the tape undoes it
            return
        if not self._written.roots and not self._written.generators:
            return
        storages = self._written.storages()
        self._kept = kept_memory(self.arena, storages, self._kept)
        undo.keep(storages, self._generators(leaves), self._kept)

    def _generators(self, leaves: Sequence[Any]) -> list[torch.Generator]:
        """The generators of this call that segments up to the last break draw from."""
        given = {generator_id(known): leaves[at] for at, known in self.generators.items()}
        drew = {generator_id(generator): generator for generator in self._written.generators}
        return [given.get(key, one) for key, one in drew.items()]

    def segment(self, number: int) -> Callable[[Sequence[Any]], None]:
        """See ``SegmentedRecording``."""
        found: Callable[[Sequence[Any]], None] = self._segments[number]
        return found

    def meet(self, number: int, leaves: Sequence[Any]) -> Found:
        """See ``SegmentedRecording``."""
        try:
            result = self._meetings[number](leaves)
        except Exception as error:
            if not is_interrupt(error):  # else nothing has happened, once all was put back
                self._met = number
            raise
        return found(self.reads[number], result)

    def note_returned(self, read: Mapping[int, Any]) -> None:
        """See ``SegmentedRecording``."""
        self._returned = {number: value for number, value in read.items() if self.reads[number].startswith(RETURNED)}

    @override
    def stop(self, error: BaseException) -> Stop | None:
        if self.read_values is not None and self._stopped is not None:
            left = self._stopped[1]
            values = {-1 - number: left[self._locals[number]] for number in self._read_numbers} if left else {}
            self._returned = {number: value for number, value in values.items() if value is not None}
        stop, self._returned, returned = super().stop(error), {}, self._returned
        read = {id(self._breaks[number]): value for number, value in returned.items()}
        if stop is None or not read:
            return stop
        ran = [one if id(one.step) not in read else evolve(one, result=read[id(one.step)]) for one in stop.ran]
        return evolve(stop, ran=ran)

    @override
    def was_stopped(self) -> bool:
        if not self._is_apart:
            return super().was_stopped()
        if self._met is not None:
            self._stopped, self._met = (self._begins[self._met + 1] - 1 + len(self._views), (), ()), None
            return True
        if self._through is not None and self._look_at(self._through, -self._num_keeps):
            self._is_back = True
            return True
        self._is_back, views = False, len(self._views)  # they are steps of the last segment
        begins = [*[begin + views for begin in self._begins[:-1]], *self._begins[-1:]]
        return any(self._look_at(one, begin) for one, begin in zip(self._segments, begins, strict=False))

    @override
    def answers(self, error: BaseException, leaves: Sequence[Any]) -> Answers | None:
        """See ``Recording``."""
        is_last = (
            not self._is_apart
            or self._is_back
            or (self._stopped is not None and self._stopped[0] - len(self._views) >= self._begins[-1])
        )
        stop = self.stop(error)
        if stop is None:
            return None
        if not is_last:  # what was written to copies of the caller's tensors; the last segment brought it back
            with torch.no_grad():
                native.Tape(self.registers, self._calls[len(self._calls) - len(self.copies_out) :])(leaves)
        return Answers(stop)

    def island(self, number: int, leaves: Sequence[Any]) -> IslandCall | None:
        """See ``SegmentedRecording``."""
        if number not in self._islands:
            return None
        grad, places = self._islands[number]
        step = self._breaks[number]
        assert callable(step.function)
        if number not in self._given_to:
            self._given_to[number] = self._by_root(step)
        tensors: dict[int, torch.Tensor] = {}
        lent = []
        for root, numbers in self._given_to[number]:
            if root.kind == "static":  # memory of the caller
                tensors.update((at, self.registers[at]) for at in numbers)
            elif root.kind == "block":
                if root.number not in self._builders:
                    assert root.storage is not None
                    block = Block(root.storage.data_ptr(), root.storage.nbytes())
                    self._builders[root.number] = block, self.arena.builder(block, self._places[numbers[0]][1])
                block, build = self._builders[root.number]
                first = tensors[numbers[0]] = build()
                if len(numbers) > 1:
                    views = views_of(first, [self._places[at][1] for at in numbers[1:]])
                    tensors.update(zip(numbers[1:], views, strict=True))
                lent.append((block, first.untyped_storage()))
            else:
                tensors.update((at, self.registers[at].clone()) for at in numbers)
        owners = [root.owner for root in self._written.roots if root.owner is not None]
        given = (*step.args, step.kwargs)
        args, values, kwargs = (
            filled(template, Register, lambda register: tensors[register.number]) for template in given
        )
        before = Before(places, values)
        return IslandCall(step.function, args, kwargs, grad, lent, owners, self._generators(leaves), before)

    def _by_root(self, step: TapeStep) -> list[tuple[TapeMemory, list[int]]]:
        """Registers among what a step gets, by the memory that they lie on."""
        found: dict[int, tuple[TapeMemory, list[int]]] = {}
        for at in dict.fromkeys(registers_in((step.args, step.kwargs))):
            root = self._places[at][0]
            found.setdefault(root.number, (root, []))[1].append(at)
        return list(found.values())

    def _meeting(self, step: TapeStep) -> Callable[[Sequence[Any]], Any]:
        function, registers = _READERS.get(step.name, step.function), self.registers
        assert callable(function)
        if len(step.args) == 1 and isinstance(step.args[0], Register) and not step.kwargs:
            number = step.args[0].number
            return lambda _: function(registers[number])  # fast way: most breaks read one number

        def meet(leaves: Sequence[Any]) -> Any:
            kwargs = {name: self._given(value, leaves) for name, value in step.kwargs.items()}
            return function(*self._given(step.args, leaves), **kwargs)

        return meet

    def settle(self, number: int, found: Found) -> None:
        """See ``SegmentedRecording``."""
        for out, tensor in zip(self._breaks[number].outs, found.made, strict=True):
            if out is not None:
                self.registers[out[1]].copy_(tensor)

    def _given(self, template: Any, leaves: Sequence[Any]) -> Any:
        if isinstance(template, Leaf):
            return leaves if template.position is None else leaves[template.position]
        if isinstance(template, (list, tuple)):
            return type(template)([self._given(member, leaves) for member in template])
        return self.value(template)

    def joins(self, other: SegmentedTape, breaks: int, given: Sequence[Mapping[int, str]] = ({}, {})) -> bool:
        """See ``SegmentedRecording``."""
        mine, theirs = given
        return self.staged == other.staged and self._trunk(breaks, mine) == other._trunk(breaks, theirs)

    def _trunk(self, breaks: int, given: Mapping[int, str]) -> list[Key]:
        """What happened before the break, and what its operator gets: what it gives is told by what was read."""
        end = [at for at, step in enumerate(self._steps) if step.form == "break"][breaks - 1]
        keys = self._keys[: end + 1]
        if given:  # since the keys were made; other numbers are told by what they were then
            lifted = {number: _key_of(value, {}) for number, value in self.lifted.items()}
            places = {**self._key_places, **lifted, **{number: ("number", text) for number, text in given.items()}}
            for at, step in enumerate(self._steps[: end + 1]):
                if not given.keys().isdisjoint(registers_in((step.args, step.kwargs))):
                    keys[at] = _key_of_step(step, places)
        return [*keys[:end], keys[end][:-1]]

    # ---------------------------------------------------------------------------------------------- what is another way

    @override
    def make_owned(self, outputs: Sequence[OwnedOutput]) -> Callable[[], None] | None:
        """What is written before the last break is copied after each replay: others may have to go on from there."""
        if not self._is_apart:
            return super().make_owned(outputs)
        trunk = self._trunk_steps()
        before = {number for step in trunk for number in registers_in((step.args, step.kwargs))}
        before |= {out[1] for step in trunk for out in step.outs if out is not None}
        roots = [self._kept_root(output.block) for output in outputs]
        is_last = [
            before.isdisjoint(root.registers.values()) and self._is_in_c(output, root)
            for output, root in zip(outputs, roots, strict=True)
        ]
        last = [output for output, its_own in zip(outputs, is_last, strict=True) if its_own]
        others = [output for output, its_own in zip(outputs, is_last, strict=True) if not its_own]
        collect = super().make_owned(last) if last else None
        copies = OutputCopies(self.arena, others) if others else None
        if collect is None or copies is None:
            return copies if collect is None else collect
        return functools.partial(_both, collect, copies)

    @override
    def avoid(self, block: Block) -> bool:
        return not any(self.is_in(root, block) for root in self._roots) if self._is_apart else super().avoid(block)

    @override
    def bind_inputs(self, inputs: Sequence[BoundInput]) -> frozenset[str]:
        return frozenset() if self._is_apart else super().bind_inputs(inputs)

    @override
    def release(self) -> None:
        super().release()
        self._segments, self._breaks, self._meetings, self._written = [_in_segments], [], [], _Written()
        self._begins, self._returned, self._kept, self._written_at = [], {}, None, []
        self._islands, self._places, self._given_to, self._builders = {}, {}, {}, {}
        self._key_places = {}
        self._copies, self._through, self._keeps_first = ([], [], None), None, False


def _copying(into: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return copy_all, (("constant", into), ("constant", of)), (), (), True


def _both(one: Callable[[], None], other: Callable[[], None]) -> None:
    one()
    other()


def _in_segments(leaves: Sequence[Any]) -> None:
    raise RuntimeError("this recording runs segment by segment, or was released")


def _key_of_root(root: TapeMemory) -> Key:
    """A key for memory: two tapes whose guards hold have equal keys for the same memory."""
    assert root.storage is not None or root.kind == "static"
    if root.kind == "static":
        return root.kind, root.path
    assert root.storage is not None
    if root.kind == "constant":
        return root.kind, bytes(root.storage)
    return root.kind, root.storage.data_ptr(), root.storage.nbytes()


def _key_of_step(step: TapeStep, places: dict[int, Key]) -> Key:
    outs = [None if out is None else places[out[1]] for out in step.outs]
    return (
        step.name,
        step.form == "break",
        _key_of(step.args, places),
        _key_of(tuple(step.kwargs.items()), places),
        outs,
    )


def _key_of(template: Any, places: dict[int, Key]) -> Any:
    """What a step is given, so that it can be compared."""
    if isinstance(template, Register):
        return places[template.number]
    if isinstance(template, (list, tuple)):
        return [_key_of(member, places) for member in template]
    if type(template) is dict:
        return [(key, _key_of(member, places)) for key, member in template.items()]
    if isinstance(template, (Leaf, str, type(None), bool, int, float, complex)):
        return type(template), repr(template)
    if isinstance(template, torch.Generator):
        return generator_id(template)
    if isinstance(template, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return repr(template)
    return id(template)
