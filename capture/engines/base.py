"""What the tree of recordings asks of an engine.

An engine has one ``Pool`` for each tree. It runs a body once as a recording, replays it into the same memory, and tells
where outputs lie. The tree decides what runs when; an engine never does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from attrs import field

from capture.core.data import define, frozen
from capture.core.facts import Drift, SequenceChange
from capture.core.schedule import Schedule
from capture.engines.undo import Places, Undo
from capture.observe.described import DescribedRun
from capture.observe.expectation import Expectation
from capture.observe.islands import Before
from capture.observe.operator_schema import read_text, tensors_out
from capture.observe.returned_value import RETURNED
from capture.observe.run import ObservedRun
from capture.state.call import Call

Address = int


@frozen
class Block:
    """A piece of the pool: ``address`` of its first byte and its size."""

    address: Address
    nbytes: int

    def holds(self, address: Address) -> bool:
        """Whether the address lies in this part of memory."""
        return self.address <= address < self.address + self.nbytes

    def overlaps(self, other: Block) -> bool:
        """Whether the two parts of memory share bytes."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


_offset, _stride, _size = torch.Tensor.storage_offset, torch.Tensor.stride, torch.Tensor.size
"""torch's own functions, also while a body is watched: the wrappers that are in place then cost more than the look
itself. Of an uninitialized parameter ``shape`` raises."""


@frozen(kw_only=True, cache_hash=True)
class Geometry:
    """A tensor on a storage that begins where its block begins. Offset and strides in elements."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    """Torch's lazy conjugation bit."""

    @staticmethod
    def of(tensor: torch.Tensor) -> Geometry:
        """Geometry of a tensor relative to its own storage."""
        shape, stride = tuple(_size(tensor)), tuple(_stride(tensor))
        return _one_of_each(tensor.dtype, int(_offset(tensor)), shape, stride, tensor.is_conj())


@functools.lru_cache(maxsize=2048)
def _one_of_each(
    dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], conj: bool
) -> Geometry:  # fmt: skip
    """Share equal values: a recording has many tensors of few geometries."""
    return Geometry(dtype=dtype, offset=offset, shape=shape, stride=stride, conj=conj)


def views_of(first: torch.Tensor, geometries: Sequence[Geometry]) -> list[torch.Tensor]:
    """Views of a tensor with any geometry on its storage, also of another dtype."""
    physical = first.conj() if first.is_conj() else first
    views = []
    for geometry in geometries:
        base = physical
        if geometry.dtype != first.dtype:
            elements = first.untyped_storage().nbytes() // first.element_size()
            base = physical.as_strided((elements,), (1,), 0)
            if base.dtype.is_complex != geometry.dtype.is_complex:  # Tensor.view does not cross this line
                base = torch.view_as_real(base).reshape(-1) if base.dtype.is_complex else base
            base = base.view(geometry.dtype) if base.dtype != geometry.dtype else base
        view = base.as_strided(geometry.shape, geometry.stride, geometry.offset)
        views.append(view.conj() if geometry.conj else view)
    return views


def on_storage(storage: torch.UntypedStorage, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these on another storage, sharing a version counter."""
    model = like[0]
    first = torch.empty(0, dtype=model.dtype, device=model.device)
    first = first.set_(
        storage, model.storage_offset(), model.shape, model.stride()
    ).data  # with the version of a tensor that nobody wrote yet
    others = views_of(first, [Geometry.of(tensor) for tensor in like[1:]])
    return [first.conj() if model.is_conj() else first, *others]


@frozen(kw_only=True)
class Input:
    """How leaf number ``position`` of the call reaches the body. ``managed``: the block of the output it is."""

    position: int
    how: Literal["static", "copy", "copy-back", "managed"]
    group: int | None = None
    """Leaves of one group share memory and are staged together."""
    managed: Block | None = None
    is_bound: bool = False
    """Static, but it may lie elsewhere in every call: see ``Recording.bind_inputs``."""
    is_apart: bool = False
    """Static, on memory on which Python state holds tensors, too. The body sees it through a storage of its own, so
    that its accesses to the argument and to the state can be told apart: in later calls they may lie on different
    memory."""


@frozen
class StateTensors:
    """What is known of tensors in Python state, by path."""

    moving: frozenset[str] = frozenset()
    """They are others in the next call: an engine that cannot bind them anew reads a copy."""
    written: frozenset[str] = frozenset()
    """The body writes them, which nobody would see in a copy: they are read and written where they are."""


NOTHING_KNOWN = StateTensors()


@frozen(kw_only=True)
class BoundInput:
    """An argument that a recording reads where each call has it."""

    position: int
    path: str
    is_written: bool


@define(eq=False)
class Move:
    """A tensor that a recording reads where it is: at ``before``, the address it is bound to, or somewhere else."""

    path: str
    before: Address
    tensor: torch.Tensor
    was: torch.Tensor | None = None
    """The tensor object that it was before, for a tensor in Python state."""


@frozen(eq=False)
class Refusal:
    """Why a recording cannot be bound to other addresses."""

    reason: str
    kernel: str | None = None
    lasting: bool = True
    """It follows from the body: no other recording of it can be bound either."""
    environment: bool = False
    """No recording of this process can be bound to other addresses."""
    paths: tuple[str, ...] = ()
    """The tensors it is about; empty: all that moved."""


@frozen(eq=False)
class OwnedOutput:
    """An output that has fresh memory in every call: where it lies in the pool, and where each replay leaves its
    tensor, or the list of its tensors."""

    block: Block
    geometries: tuple[Geometry, ...]
    places: list[Any]
    number: int
    """The number of its place."""


@define(eq=False)
class IslandCall:
    """A function that runs at a break, and what it gets in this call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    """The grad mode that the body called it in."""
    lent: Sequence[tuple[Block, torch.UntypedStorage]] = ()
    """Parts of the pool among its arguments. A storage that outlives the call was kept by the function."""
    beside: Sequence[torch.Tensor] = ()
    """Tensors of the caller that segments write: the function may write them, too."""
    generators: Sequence[torch.Generator] = ()
    """Generators that it may draw from."""
    before: Before = field(factory=Before)
    """Python state that it finds changed."""

    def forget(self) -> None:
        """The function has run: drop its arguments."""
        self.args, self.kwargs, self.lent, self.before = (), {}, (), Before()


@frozen(eq=False)
class Found:
    """What the host read at a break, in one call."""

    text: str
    """The value as text, as in ``Facts.reads``."""
    made: Sequence[Any] = ()
    """What the operator returned, for the recording that goes on."""
    value: Any = None
    """The value that was read, if the body returns it."""


def found(recorded: str, result: Any) -> Found:
    """What an operator returned at a break, when this was ``recorded``."""
    if recorded.startswith(RETURNED):
        return Found(recorded, value=result)
    if type(result) in (bool, int, float):
        return Found(repr(result))
    return Found(read_text(result), tensors_out(result))


class Recording(Protocol):
    """One recorded graph, or several with breaks between them, where the host read values."""

    num_ops: int
    graph_bytes: int
    """Device memory that the graph itself takes, beside the pool; 0 on the CPU."""
    copied_paths: frozenset[str]
    """Tensors of Python state that are copied before every replay."""
    copied_inside: int
    """Number of inputs that the graph itself copies, from wherever a call has them."""
    replay: Callable[[Sequence[Any]], None]
    """Copy the copied inputs in, run, copy mutated ones back. Called with this call's leaves, as in ``Input``. One with
    breaks runs segment by segment instead."""
    reads: tuple[str, ...]
    """What the host read at each break when this was recorded. A segment ends in the break of its number, the last one
    in none."""

    @property
    def order(self) -> str:
        """In which order its kernels run, if another order than the recorded one was looked for; else empty."""

    @property
    def rebinds_tensors(self) -> bool:
        """Whether ``rebind`` works for tensors that are read where they are."""

    def rebind(self, moves: Sequence[Move]) -> bool:
        """Read and write these static tensors at their new addresses from now on.

        False if the engine cannot, or not before ``learn``; nothing has changed then.
        """

    def learn(
        self, call: Call, moves: Sequence[Move], others: Sequence[Move], generators: Sequence[torch.Generator]
    ) -> Refusal | None:
        """Find out where the recording holds the addresses of ``moves``: None if ``rebind`` knows them all from now on.

        The pool is as at the recording. The body's Python runs once and is undone. ``others``: the static tensors that
        did not move.
        """

    def bind_inputs(self, inputs: Sequence[BoundInput]) -> frozenset[str]:
        """From now on every replay reads and writes these arguments, static so far, where its call has them. Gives the
        paths of those that the engine knows how to ``rebind``; the others stay as they are."""

    def leaves_alone(self, moves: Sequence[Move]) -> frozenset[str]:
        """Of tensors that no operator reads, asked for at their first move: the paths of those that nothing else in the
        recording can read or write either. Wherever they lie from now on, it runs as it is."""

    def kernels_using(self, paths: Sequence[str]) -> list[str]:
        """Names of the kernels known to use these tensors."""

    def make_owned(self, outputs: Sequence[OwnedOutput]) -> Callable[[], None] | None:
        """From now on these outputs, and no others, have fresh memory in every call. Gives what makes it after a
        replay; None if every replay does."""

    def avoid(self, block: Block) -> bool:
        """Write nothing in this part of the pool from now on. False if the engine cannot tell, or has to write
        there."""

    def schedule(self) -> Schedule | None:
        """Which operators need the results of which others; None where the engine does not know that, as on CUDA."""

    def was_stopped(self) -> bool:
        """Whether one of the body's operators raised in the last replay; those before it have run. True once for each
        such replay."""

    def answers(self, error: BaseException, leaves: Sequence[Any]) -> Any:
        """After ``was_stopped`` in a call on these leaves: a watch under which the body, run with the call's own
        arguments, comes to the operator that raised without running others, is given the error there, and goes on
        eagerly. ``again()`` of it gives another one. None: there is no way."""

    def release(self) -> None:
        """Drop the graph; its blocks may be reused."""


class SegmentedRecording(Recording, Protocol):
    """A recording with ``reads``. Grad mode is off in all that is called here for a replay."""

    @property
    def kept_places(self) -> Places:
        """The memory that ``keep`` copies."""

    def read_in_line(self) -> list[Any] | None:
        """From now on ``replay`` does all of it, and a call that stops is not put back. Gives the list where each
        replay leaves what the body only hands on, by the number of the read; None where it can only run in segments.
        Where another value is read than the body went on from, it raises ``Parted`` with the number of the read and the
        value, and what it has changed by then that the caller can see is kept."""

    def keep(self, undo: Undo, leaves: Sequence[Any], *, after_one_go: bool = False) -> None:
        """Keep what its segments change before the last break, and the caller can see. ``after_one_go``: ``replay`` has
        just raised ``Parted``."""

    def put_back(self) -> None:
        """Undo what ``replay`` did before it raised ``Parted``, unless ``keep`` was told of that."""

    def segment(self, number: int) -> Callable[[Sequence[Any]], None]:
        """The function that runs one segment. The first segment copies inputs in, the last one copies mutated ones
        back."""

    def meet(self, number: int, leaves: Sequence[Any]) -> Found:
        """Do at a break what the host did there."""

    def island(self, number: int, leaves: Sequence[Any]) -> IslandCall | None:
        """The island at a break, to be called in the place of ``meet``; None for any other break."""

    def settle(self, number: int, found: Found) -> None:
        """This recording goes on from there, with what the break's operator ``made``."""

    def note_returned(self, read: Mapping[int, Any]) -> None:
        """Values that were read at its breaks in a call that an operator ended by raising, for ``answers``."""

    def joins(self, other: Any, breaks: int, given: Sequence[Mapping[int, str]] = ({}, {})) -> bool:
        """Whether both do the same with the same memory up to this number of breaks, so that each may go on where the
        other comes to a break. ``given``: for both, by register, what the numbers are that each replay puts."""


@frozen(eq=False)
class Recorded:
    """What recording gave: the watched run, its facts, and either a recording or the reason there is none."""

    watched: ObservedRun | None
    """None if the body was not reached."""
    described: DescribedRun | None
    recording: Recording | None
    failure: str | None = None
    blocks: tuple[Block | None, ...] = ()
    """Block of each kept leaf that is ``fresh``, outputs first, then effects; None for the others."""
    executed: bool = True
    """The run was the call. If not, the first replay is, or the body has to be run for it."""
    layout: Any = None
    """The pool as the recording left it, for ``Pool.restore``."""
    parts: tuple[tuple[Literal["create", "instantiate"], float, int], ...] = ()
    """Parts of the work that have an event of their own: kind, milliseconds, bytes."""
    stopped: bool = False
    """The engine stopped the body by an exception of its own."""
    followed: Literal["no", "yes", "unsuited", "differs"] = "no"
    """The run was expected to be what a watched run was, on state outside of the pool. ``unsuited``, ``differs``: there
    is no recording, and the caller asks for one without expectations; only ``differs`` says something of the body."""
    parted: SequenceChange | Drift | None = None
    """Where a run that ``differs`` left the watched run's way."""
    transient: bool = False
    """The failure says nothing about the body: memory ran out."""


class Pool(Protocol):
    """The memory all recordings of one tree share."""

    free_between_recordings: bool
    """No memory of it is taken between recordings, so that each has to restore its layout first."""

    ranges: Any
    """Where the pool is, as ``native.AddressRanges``, for the C module; None while it may have become larger: then that
    asks ``find``."""

    def find(self, address: Address) -> bool:
        """Whether the address lies in the pool."""

    def reserved_bytes(self) -> int:
        """Bytes the pool has ever used at once."""

    def snapshot(self) -> list[dict[str, Any]]:
        """Its memory as ``torch.cuda.memory._snapshot`` tells it, where that does not tell it by itself."""

    def tensor(self, block: Block, geometry: Geometry) -> torch.Tensor:
        """A fresh tensor, on a storage of its own, over a block."""

    def builder(self, block: Block, geometry: Geometry) -> Callable[[], torch.Tensor]:
        """A function that makes such a tensor on each call."""

    def views(self, block: Block, geometries: Sequence[Geometry]) -> list[torch.Tensor]:
        """Fresh tensors that share one storage over a block."""

    def make_room(self) -> bool:
        """Before a recording: give memory that eager code left unused outside of the pool back to the device. True if
        that was done."""

    def can_restore(self, layout: Any, live: Sequence[Block]) -> bool:
        """Whether these blocks can be taken once more. Where a recording only lent one, as to an island that kept it,
        an allocator that takes none by its address cannot."""

    def restore(self, layout: Any, live: Sequence[tuple[Block, torch.UntypedStorage]]) -> None:
        """Make exactly these blocks taken, each until its storage dies; all others are free. They were taken in
        ``layout``, which a recording left; None for the empty pool."""

    def device_guard(self) -> AbstractContextManager[object] | None:
        """Makes the pool's device the current one for the length of a block; None where nothing has to be done."""

    def is_tidy(self) -> bool:
        """Whether no memory is taken that nobody tracks."""

    def keep_for(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """The pool is given up: its memory stays until these storages die."""

    def poison(self, live: Sequence[Block]) -> None:
        """Fill everything but these blocks with bytes that read as NaN."""

    def enter(self) -> None:
        """Order what follows on the current stream after the last replay, and the next replay after that."""

    def used(self) -> list[tuple[Block, torch.UntypedStorage]]:
        """The blocks of a run without a recording that are still used."""

    def before_eager(self) -> Callable[[], None] | None:
        """A function to call before eager code runs on the stream that recordings are made on; it outlives the pool.
        None where nothing has to be done."""


Number = float | int


@frozen(eq=False)
class NumbersToLift:
    """Numbers that may be others in each call."""

    then: tuple[Number, ...]
    """As they were in another recording."""
    now: tuple[Number, ...]
    """As they are in the recording that is to run with any."""
    given: Callable[[Sequence[Number]], list[Number] | None]
    """What operators may get of them: they themselves, and what Python computes. None if Python cannot."""
    again: Callable[[Sequence[Number]], tuple[Call, Sequence[torch.Generator]]]
    """The recorded call with others, and the generators that it may draw from; the pool is as at the recording. For an
    engine that has to run the body's Python once more; what that does is undone."""
    may_be: Callable[[Sequence[Number]], bool] = lambda _: True
    """Whether the body goes the same way with others, as far as it is known to ask something of them."""


class LiftedNumbers(Protocol):
    """Numbers that each replay of a recording takes from its call."""

    used: tuple[int, ...]
    """Which of the numbers that were ``given`` operators get. Only these are put, in this order."""
    powers: frozenset[int]
    """Positions in ``used`` of numbers that are exponents. Some exponents have kernels of their own, so whole numbers
    are not put there."""

    def takes(self, values: Sequence[Number]) -> bool:
        """Whether ``put`` can set these numbers."""

    def put(self, values: Sequence[Number]) -> bool:
        """Set the numbers for the next replay. False if that failed: the recording may have any of them then."""


class Backend(Protocol):
    """An engine for one device type."""

    name: str
    """``cpu``, ``cuda:0``."""
    has_own_memory: bool
    """The device has memory of its own."""
    executes_recording_runs: bool
    """A recording run of a body that ran before executes it, so that it is a call. If False it only captures, and a
    replay makes the call."""
    rebinds_to_pool: bool
    """``Recording.rebind`` takes tensors in the pool as well."""
    breaks_at_reads: bool
    """Bodies in which the host reads values can be recorded."""
    runs_islands: bool
    """Bodies with islands can be recorded."""
    lifts_numbers: bool
    """Whether ``lift`` may succeed."""
    owns_in_place: bool
    """``Recording.make_owned`` has outputs written where their callers have them, and no more in the pool."""

    @property
    def rebinds_tensors(self) -> bool:
        """Whether recordings can be pointed at other addresses, unless something in them forbids it."""

    def memory_bytes(self) -> int:
        """Bytes of the device's memory."""

    def new_pool(self) -> Pool:
        """An empty pool."""

    def lift(
        self, one: Recording, other: Recording, numbers: NumbersToLift
    ) -> LiftedNumbers | str:  # fmt: skip
        """If both recordings differ in nothing but these numbers, have ``other`` run with any numbers. Else a text that
        says why it cannot."""

    def lift_like(
        self, known: LiftedNumbers, other: Recording, given: Sequence[Number]
    ) -> LiftedNumbers | str:  # fmt: skip
        """The same for a recording of another size, by the places that a recording of the same operators has numbers
        at: ``other`` has to have there what was ``given`` in its run, and nowhere else. Else a text that says why it
        cannot."""

    def in_capture(self) -> bool:
        """Whether somebody else captures what this thread does now: a call becomes part of that capture."""

    def capture_look(self) -> Callable[[], bool] | None:
        """``in_capture`` for the C module, which asks in every call; None where nobody ever captures."""

    def record(
        self, pool: Any, call: Call, inputs: Sequence[Input], *, undo: bool = False,
        state: StateTensors = NOTHING_KNOWN, generators: Sequence[torch.Generator] = (),
        expected: Expectation | None = None, may_break: bool = False, schedule: bool = False,
    ) -> Recorded:  # fmt: skip
        """Run the body of ``call`` once, in the pool, as a recording. ``may_break``: in segments, where the host reads
        values. ``schedule``: its kernels may run in another order later, if that is faster.
        ``undo``: keep what ``observe.run.undo`` needs and leave the caller's mutated arguments alone. ``state``: what
        is known of tensors in Python state. ``generators``: all that the body may draw from, beside the default ones.
        ``expected``: what a watched run told; an engine may take that for known, and stop where the body does anything
        else (``Recorded.followed``).

        If ``executed``, the run is the call: its effects on the caller's tensors, generators and Python state have
        happened afterwards, once, and its result is in the returned ``ObservedRun``, also where ``recording`` is None.
        Else only the body's Python has run.
        """
