"""What one recorded graph does on every call: order, copies in, patches, launch, copies back, version counters.

All that does not change from call to call is looked up once, when ``prepare`` writes the replay function.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from capture.core import config
from capture.core.schedule import Schedule
from capture.engines.base import Block, BoundInput, Input, Move, NumbersToLift, OwnedOutput, Refusal, StateTensors
from capture.engines.copy_out import OutputCopies
from capture.engines.cuda import graph_edges, kernel_params
from capture.engines.cuda.address_table import AddressTable
from capture.engines.cuda.bound_inputs import BoundInputs
from capture.engines.cuda.calibrate import CalibrationSetup, learn_addresses
from capture.engines.cuda.capture_graph import Capture
from capture.engines.cuda.copy_in import DeviceConstant, DeviceCopy, InputCopies
from capture.engines.cuda.driver import is_reached_from_c
from capture.engines.cuda.kernel_params import GraphNode
from capture.engines.cuda.lifting import GraphNumbers, learn_numbers
from capture.engines.cuda.memory_recorder import MemoryNotes
from capture.engines.cuda.pool import CudaPool
from capture.engines.cuda.schedule_choice import Order, ScheduleChoice
from capture.engines.cuda.scheduling import GraphSchedule, schedule_of
from capture.engines.cuda.streams import in_order
from capture.key.tensor_meta import span_bytes
from capture.native import native
from capture.observe.described import DescribedRun
from capture.observe.run import ObservedRun
from capture.state.call import Call
from capture.torch_private import capabilities, cuda
from capture.torch_private.capabilities import generator_id

Step = Callable[[Sequence[Any]], None]
_MOVED = ": its tensors are elsewhere than when it was recorded"
_MOST_GRAPH_COPIES = (
    4  # copies in a graph: from there on one batched kernel is the shorter way, on the device above all
)


class CudaRecording:
    """Implements ``capture.engines.base.Recording``."""

    __slots__ = ("__dict__", "__weakref__", "replay")  # the C module reads ``replay`` in every call

    def __init__(
        self, pool: CudaPool, capture: Capture, input_copies: InputCopies, constants: list[DeviceConstant],
        inputs: Sequence[Input], *, draws: bool, kept: frozenset[int], written: frozenset[str] = frozenset(),
        notes: MemoryNotes | None = None,
    ) -> None:  # fmt: skip
        self._notes = notes
        """What its operators did with memory, if another order may be tried."""
        self._schedule: GraphSchedule | None = None
        self._reported: Schedule | None = None
        self._choice: ScheduleChoice | None = None
        self._kept = kept
        """Addresses of its outputs."""
        self._written_state = written
        """Paths of tensors in Python state that the body was known to write."""
        self.num_ops = self.copied_inside = 0
        self.reads: tuple[str, ...] = ()
        self.graph_bytes = 0
        self.copied_paths = frozenset(
            device_copy.source for device_copy in input_copies.device_copies if isinstance(device_copy.source, str)
        )
        self._pool, self._capture, self._input_copies = pool, capture, input_copies
        self._constants = constants  # the graph reads them
        self.draws = draws
        """It is launched by torch, which hands it seeds and moves generators on."""
        self._was_seen_to_draw = False
        self._unread: frozenset[str] = frozenset()
        """Paths of inputs that no operator got."""
        self._alone: dict[str, bool] = {}
        """By path of tensors that no operator reads, whether no parameter of a node has an address in them."""
        self._inputs = inputs
        self._bindings: AddressTable | None = None
        self._bound: BoundInputs | None = None
        self._nodes: Sequence[GraphNode] | None = None
        """The graph's nodes with their parameters, shared by all that sets parameters; None until they are read."""
        self._numbers: GraphNumbers | None = None
        self._grad = False
        self._graph_copies: Any = None
        """The copies of all inputs, as nodes of the graph."""
        self._version_bumps: list[tuple[torch.Tensor, int]] = []
        self._static_version_bumps: list[tuple[int, int]] = []
        self._first = False
        self._generator_arguments: list[tuple[int, torch.Generator]] = []
        self.step: Step = _released
        """One replay, in the order that is in force."""
        self.replay: Step = _released

    def prepare(self, watched: ObservedRun, described: DescribedRun, static: set[int], *, counted: bool) -> None:
        """Instantiate the graph and write the replay function.

        ``static``: positions of arguments that are read where they are. ``counted``: version counters show the first
        replay's writes already, as the capture's own operators moved them.
        """
        self._first, self._unread = counted, described.unread
        self.num_ops, self._was_seen_to_draw = described.facts.num_ops, bool(described.facts.draws)
        before, _ = torch.cuda.mem_get_info(self._pool.device)
        self._add_copies_to_graph(watched.call.leaves)
        self._capture.instantiate()
        self._use_copies()
        after, _ = torch.cuda.mem_get_info(self._pool.device)
        self.graph_bytes = max(before - after, 0)
        for constant in self._constants:
            constant.fill()
        arguments = {id(leaf): position for position, (_, leaf) in enumerate(watched.arguments)}
        for tensor, version in watched.versions:
            moved = tensor._version - version - self._counted_apart(tensor)
            if moved > 0 and tensor.device.type == "cuda":
                position = arguments.get(id(tensor))
                if position is None:
                    self._version_bumps.append((tensor, moved))
                elif position in static:
                    self._static_version_bumps.append((position, moved))
        for position, leaf in enumerate(watched.call.leaves):
            if isinstance(leaf, torch.Generator) and leaf.device.type == "cuda":
                self._generator_arguments.append((position, leaf))
        self._grad = torch.is_grad_enabled()
        if self._notes is not None:
            make_mark = functools.partial(torch.cuda.Event, enable_timing=True)
            self._choice = ScheduleChoice(self, config.current().schedule_after, make_mark)
            self._reported = Schedule(widths=(), longest=(), chosen="undecided")
        self._replay_by(self._make_replay())

    def _counted_apart(self, tensor: torch.Tensor) -> int:
        """How many of the writes to it are counted by what writes."""
        del tensor
        return 0

    def _use_copies(self) -> None:
        """Have input copies and lifted numbers set in the graph that was instantiated last, once that is on the
        device."""
        executable = self._capture.executable() if self._graph_copies is not None else None
        if self._graph_copies is not None:
            self._graph_copies.use(executable)
            if executable:
                graph_edges.upload(executable, cuda.raw_stream(self._pool.index))
        if self._numbers is not None:
            self._numbers.follow()

    def _replay_by(self, step: Step) -> None:
        """Use this function for replays from now on."""
        self.step = step
        self.replay = step if self._choice is None else self._choice

    # ---- the order of its kernels

    def plan_schedule(self) -> bool:
        """See ``schedule_choice.Scheduled``."""
        assert self._notes is not None
        notes, self._notes = self._notes, None
        graph, added = self._capture.graph(), self._graph_copies.nodes() if self._graph_copies is not None else []
        if graph is None or self._bindings is not None:
            reason = "the graph is empty" if graph is None else "the graph was pointed at other addresses"
            planned: GraphSchedule | str = reason
        else:
            try:
                planned = schedule_of(self._pool, graph, notes, added)
            except kernel_params.DriverError as error:
                planned = str(error)
        if isinstance(planned, str):
            self._reported = Schedule(widths=(), longest=(), chosen=f"recorded: {planned}")
            return False
        self._schedule, self._reported = planned, planned.report("undecided", None)
        return planned.dependencies.longest < len(planned.dependencies.levels)

    def run_by(self, order: Order) -> None:
        """See ``schedule_choice.Scheduled``."""
        schedule = self._schedule
        assert schedule is not None
        with torch.cuda.device(self._pool.device):
            try:
                schedule.give_edges(order)
            except kernel_params.DriverError as error:  # what is instantiated is as it was
                if order == "recorded":
                    raise
                self._refuse(str(error))
                return
            self._instantiate_again()

    def _refuse(self, reason: str) -> None:
        self._schedule, self._reported = None, Schedule(widths=(), longest=(), chosen=f"recorded: {reason}")
        if self._choice is not None:
            self._choice.is_over = True
        self.decide("recorded", None)

    def _instantiate_again(self) -> None:
        """With the edges that the graph has now. The graph that was launched so far is gone: where this is stopped in
        the middle, the next replay does it once more."""

        def first(leaves: Sequence[Any]) -> None:
            with torch.cuda.device(self._pool.device):
                self._instantiate_again()
            self.step(leaves)

        self._replay_by(first)
        self._capture.instantiate()
        self._use_copies()
        self._replay_by(self._make_replay())

    def decide(self, order: Order, times: tuple[float, float] | None) -> None:
        """See ``schedule_choice.Scheduled``."""
        schedule = self._schedule
        if schedule is not None:
            is_chain = schedule.dependencies.longest == len(schedule.dependencies.levels)
            reason = ": each kernel needs the one before it" if is_chain else _MOVED
            self._reported = schedule.report(order if times is not None else f"{order}{reason}", times)
        elif self._reported is not None and self._reported.chosen == "undecided":
            self._reported = Schedule(widths=(), longest=(), chosen=f"{order}{_MOVED}")
        self._choice = self._notes = None
        self._schedule = schedule if order == "by data" else None
        self._replay_by(self.step)

    def _keep_order(self) -> None:
        """Its tensors are to be elsewhere, where they may share memory that they did not share: then the data asks for
        another order. The recorded one is right wherever they are."""
        if self._choice is not None:
            self._choice.end()
        elif self._schedule is not None:
            self.run_by("recorded")
            self.decide("recorded", None)

    # ---- one replay

    def _make_replay(self) -> Step:
        pool, index, grad, bound = self._pool, self._pool.index, self._grad, self._bound
        enter, raw_stream, set_grad = pool.enter, cuda.raw_stream, capabilities.set_grad_enabled
        launch = self._capture.launcher()
        in_turn = functools.partial(in_order, pool.device) if self.draws else None
        copy_in, copy_out = self._graph_copies or self._input_copies.copier(), self._input_copies.returner()
        around = self._around_draws() if self._generator_arguments else None
        raise_versions = self._raise_versions if self._version_bumps or self._static_version_bumps else None
        beside = pool.beside

        def after(leaves: Sequence[Any]) -> None:
            if copy_out is not None:
                copy_out(leaves)
            if bound is not None:
                bound.copy_back(leaves)

        comes_after = copy_out is not None or bound is not None

        def plain(leaves: Sequence[Any]) -> None:
            if beside or raw_stream(index) != pool.ran_on:
                enter()
            if bound is not None:
                bound.patch(leaves)
            if copy_in is not None:
                copy_in(leaves)
            rest = launch, (), lambda ended: after(leaves) if ended and comes_after else None
            if in_turn is None:
                native.committed(*rest)
            else:
                in_turn(native.committed, *rest)

        def full(leaves: Sequence[Any]) -> None:
            def run() -> None:
                set_grad(False)
                if around is not None:
                    around(plain, leaves)
                else:
                    plain(leaves)

            def finish(ended: bool) -> None:
                set_grad(grad)
                if ended and raise_versions is not None:
                    raise_versions(leaves)

            native.committed(run, (), finish)

        slow = full if grad or around is not None or raise_versions is not None else plain
        if in_turn is not None and around is None and not self._was_seen_to_draw:
            return self._looking_for_draws(slow)
        odd = any(step is not None for step in (in_turn, around, raise_versions, copy_out))
        odd = odd or (grad and copy_in is not self._graph_copies)
        if odd or bound is None:
            return slow if odd else self._native(slow, copy_in)
        is_alone = copy_in in (None, self._graph_copies) and not bound.is_written
        return self._native(slow, bound.patch) if is_alone else slow

    def _looking_for_draws(self, step: Step) -> Step:
        """Attention draws only where it drops out, and its operators are the same ones. torch moves the generators on
        at every launch of a graph that draws: where they stay, nothing has to be handed to it before a launch."""

        def first(leaves: Sequence[Any]) -> None:
            generators = self._capture.generators()
            before = [generator.get_state() for generator in generators]
            step(leaves)
            self.draws = not all(map(torch.equal, before, [generator.get_state() for generator in generators]))
            self._replay_by(step if self.draws else self._make_replay())

        return first

    def _native(self, slow: Step, copy_in: Step | None) -> Step:
        """The same in C, with the gradient mode of the call: ``copy_in`` is none of torch's operators, or none that
        autograd sees. A graph that draws needs torch's launch, which hands it seeds."""
        executable = self._capture.executable() if is_reached_from_c() else None
        if executable is None:
            return slow
        step: Step = native.Launch(
            slow=slow, pool=self._pool, stream_of=cuda.raw_stream,
            device=cuda.current_device, index=self._pool.index, executable=executable,
            copies=self._graph_copies, copy_in=None if copy_in is self._graph_copies else copy_in,
        )  # fmt: skip
        return step

    def _add_copies_to_graph(self, leaves: Sequence[Any]) -> None:
        """Few inputs are copied by nodes of the graph itself: 1 us each, where ``copy_`` takes 5 us and one batched
        copy of eight takes 7 (H200)."""
        graph = self._capture.handle() if is_reached_from_c() else None
        copies = self._input_copies.plain(leaves) if graph else None
        if copies and len(copies) <= _MOST_GRAPH_COPIES:
            with torch.cuda.device(self._pool.device):
                self._graph_copies = native.Copies(graph, tuple(copies))
            self.copied_inside = len(copies)

    def _around_draws(self) -> Callable[[Step, Sequence[Any]], None]:
        """A generator passed as an argument may be another one than the graph knows: lend that one its state."""
        swaps = [(position, generator, generator_id(generator)) for position, generator in self._generator_arguments]

        def around(step: Step, leaves: Sequence[Any]) -> None:
            others = [(leaves[p], generator) for p, generator, number in swaps if generator_id(leaves[p]) != number]
            saved = [generator.get_state() for _, generator in others]
            left: list[torch.Tensor] = []

            def run() -> None:
                for theirs, generator in others:
                    generator.set_state(theirs.get_state())
                step(leaves)

            def finish(ended: bool) -> None:
                if ended and len(left) < len(others):  # else it was stopped, and the states are known
                    left[:] = [generator.get_state() for _, generator in others]
                for (theirs, _), state in zip(others, left, strict=False):
                    theirs.set_state(state)
                for (_, generator), state in zip(others, saved, strict=True):
                    generator.set_state(state)

            native.committed(run, (), finish)

        return around

    def _raise_versions(self, leaves: Sequence[Any]) -> None:
        """The graph writes static tensors; autograd must see it on their version counters."""
        if self._first:
            self._first = False
            return
        static = [(leaves[position], times) for position, times in self._static_version_bumps]
        for tensor, times in (*self._version_bumps, *static):
            for _ in range(times):
                torch.autograd.graph.increment_version(tensor)

    @property
    def order(self) -> str:
        """See ``Recording``."""
        return self._reported.text() if self._reported is not None else ""

    @property
    def rebinds_tensors(self) -> bool:
        """Whether the driver can be asked. Not looked up before a tensor moves, as it takes an import."""
        return kernel_params.missing() is None

    def rebind(self, moves: Sequence[Move]) -> bool:
        """What is copied before every replay is copied from elsewhere; for the others the graph is patched."""
        addresses = {
            move.path: address
            for move in moves
            if not self._is_followed(move) and (address := move.tensor.data_ptr()) != move.before
        }
        if addresses:
            self._keep_order()
            if self._bindings is None or not self._bindings.bind(addresses):
                return False
        if self.copied_paths:
            device_copies = {device_copy.source: device_copy for device_copy in self._input_copies.device_copies}
            for move in moves:
                if move.path in device_copies:
                    device_copies[move.path].tensor = move.tensor
        if self._version_bumps:
            new = {id(move.was): move.tensor for move in moves if move.was is not None}
            self._version_bumps[:] = [(new.get(id(tensor), tensor), times) for tensor, times in self._version_bumps]
        return True

    def _is_followed(self, move: Move) -> bool:
        """Whether no parameter of the graph has to be another one for this move."""
        return move.path in self.copied_paths or self._alone.get(move.path, False)

    def leaves_alone(self, moves: Sequence[Move]) -> frozenset[str]:
        """See ``Recording.leaves_alone``. A kernel that no operator tells of is given the addresses themselves."""
        new = [move for move in moves if move.path not in self._alone]
        if new:
            words = self._words()
            for move in new:
                begin, end = move.before, move.before + span_bytes(move.tensor)
                first = None if words is None else bisect.bisect_left(words, begin)
                is_named = words is None or first is None or (first < len(words) and words[first] < end)
                self._alone[move.path] = not is_named
        return frozenset(move.path for move in moves if self._alone[move.path])

    def _graphs(self) -> Sequence[torch.cuda.CUDAGraph | None]:
        return [self._capture.graph()]

    def _words(self) -> list[int] | None:
        """All that may be an address in the parameters of the nodes, in order; None if it cannot be told."""
        if kernel_params.missing() is not None:
            return None
        try:
            with torch.cuda.device(self._pool.device):
                nodes = [node for graph in self._graphs() if graph is not None for node in kernel_params.read(graph)]
        except kernel_params.DriverError:
            return None
        if any(node.words.closed is not None for node in nodes):
            return None
        return sorted(word for node in nodes for word in node.words.words)

    def learn(
        self, call: Call, moves: Sequence[Move], others: Sequence[Move], generators: Sequence[torch.Generator]
    ) -> Refusal | None:
        """See ``Recording.learn``. A second capture tells."""
        try:
            return self._learn(call, moves, others, generators)
        finally:
            self._pool.abandon()  # what was taken for the capture, where it came to none

    def _learn(
        self, call: Call, moves: Sequence[Move], others: Sequence[Move], generators: Sequence[torch.Generator]
    ) -> Refusal | None:
        self._keep_order()
        reason = kernel_params.missing()
        if reason is not None:
            return Refusal(reason, environment=True)
        made = self._made()
        there = [move for move in (*moves, *others) if not self._is_followed(move)]
        elsewhere = [move for move in there if move.tensor.data_ptr() != move.before]
        others = [move for move in there if move not in elsewhere]
        learned = learn_addresses(
            self._pool, self._capture, self._bindings, made, call, elsewhere, others, generators, self._nodes
        )
        if isinstance(learned, Refusal):
            return learned
        self._bindings, self._nodes = learned, learned.nodes
        return None

    def _made(self) -> CalibrationSetup:
        added = frozenset(self._graph_copies.nodes() if self._graph_copies is not None else ())
        state = StateTensors(self.copied_paths, self._written_state)
        memory: list[DeviceCopy | DeviceConstant] = [*self._input_copies.device_copies, *self._constants]
        return CalibrationSetup(self._inputs, state, memory, added, self._unread)

    def lift(self, numbers: NumbersToLift) -> GraphNumbers | str:
        """See ``Backend.lift``. Further captures tell where the numbers are."""
        reason, graph = kernel_params.missing() or graph_edges.missing(), self._capture.graph()
        if reason is not None or graph is None or not self._pool.shared or self._numbers is not None:
            return reason or "the graph is empty, or has a pool of its own, or its numbers are lifted already"
        made = self._made()
        try:
            if self._nodes is None:
                with torch.cuda.device(self._pool.device):
                    self._nodes = kernel_params.read_captured(graph, made.added)
        except kernel_params.DriverError as error:
            return str(error)
        learned = learn_numbers(self._pool, self._nodes, made, numbers, graph)
        if isinstance(learned, Refusal):
            return learned.reason if learned.kernel is None else f"{learned.reason} ({learned.kernel})"
        self._numbers = learned
        return learned

    def bind_inputs(self, inputs: Sequence[BoundInput]) -> frozenset[str]:
        """See ``Recording.bind_inputs``. Bound are the arguments of which the bindings know all words."""
        if self._bindings is None:
            return frozenset()
        learned = [input_ for input_ in inputs if self._bindings.knows([input_.path])]
        if learned:
            earlier = self._bound.inputs if self._bound is not None else ()
            self._bound = BoundInputs(self._pool, self._bindings, (*earlier, *learned))
            self._replay_by(self._make_replay())
        return frozenset(input_.path for input_ in learned)

    def kernels_using(self, paths: Sequence[str]) -> list[str]:
        """Names of the kernels that read or write these tensors, as far as they are known."""
        return self._bindings.kernels(paths) if self._bindings is not None else []

    def make_owned(self, outputs: Sequence[OwnedOutput]) -> Callable[[], None] | None:
        """The graph goes on writing in the pool; copies are made after each replay."""
        return OutputCopies(self._pool, outputs) if outputs else None

    def avoid(self, block: Block) -> bool:
        """Where a graph writes is not known: anywhere in a pool that it shares, else in its own alone."""
        return not self._pool.shared and block.address not in self._kept

    def schedule(self) -> Schedule | None:
        """Known once another order was looked for (``schedule="auto"``)."""
        return self._reported

    def was_stopped(self) -> bool:
        """False: a graph runs as a whole, and errors of its kernels come out elsewhere."""
        return False

    def answers(self, error: BaseException, leaves: Sequence[Any]) -> None:
        """No graph stops at an operator."""
        del error, leaves

    def release(self) -> None:
        """Destroy the graph. Launches under way end as they would have."""
        self.replay = self.step = _released
        self._bindings = self._bound = self._choice = self._schedule = self._notes = None
        self._nodes = self._numbers = None
        self._capture.drop()
        self._constants = []
        self._version_bumps, self._generator_arguments = [], []


def _released(leaves: Sequence[Any]) -> None:
    raise RuntimeError("this recording was released")
