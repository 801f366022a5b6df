"""Training region: a captured function whose results need gradients is two recordings, forward and backward.

The forward pass is an entry like any other. Its body runs the user's function on aliases of the arguments and hands
out, beside the results, the tensors that its backward pass needs: they are ordinary outputs, so what is pending is what
is alive. The backward pass is a captured function of its own, of those tensors and the gradients of the results. The
caller's graph sees one node, whose inputs are the arguments and parameters that need gradients.

Dispatch asks the region to make the results part of that graph. When autograd comes to the node, much later and perhaps
in another thread, it comes in by the front door, as any caller of a captured function: ``Captured.dispatch``.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from attrs import evolve
from typing_extensions import override

from capture.autograd import accumulate_grad, higher_order, inner_results, leaf_swap, sole_use, unreached
from capture.autograd.backward_timer import BackwardTimer
from capture.autograd.recomputation import drawing_from
from capture.autograd.result_groups import Keepers, Part
from capture.autograd.saved_graph import ForwardOutputs, GraphSaver, SavedGraph, lies_apart
from capture.core.config import current as current_config
from capture.core.config import using
from capture.core.data import define, frozen
from capture.core.errors import CaptureBug, CaptureError
from capture.core.facts import Facts, GradientObstacle, GradientOrder, GradientUse
from capture.core.interrupts import is_interrupt
from capture.core.plan import CapturePlan
from capture.engines.base import Backend, Pool
from capture.key.modes import inlined
from capture.key.packages import is_library, package_of
from capture.key.pytree import TENSOR_TYPES, replace_leaves, result_leaves
from capture.key.signature import Leaf, make_binder
from capture.native import MISS, native
from capture.observe import run as run_module
from capture.observe import shared_casts, source_location
from capture.observe.capture_lock import locked_or
from capture.rules.compile_plan import compile_plan
from capture.runtime import fault
from capture.runtime.captured import Captured
from capture.runtime.entry import Entry
from capture.runtime.fast_path import Shortcuts
from capture.runtime.payoff import Payoff, own_time
from capture.state import snapshot
from capture.state.call import Call
from capture.state.source import Source
from capture.torch_private import autograd as torch_autograd
from capture.torch_private import capabilities, checkpoints
from capture.torch_private.autograd import NO_NUMBER, number_of
from capture.torch_private.capabilities import NO_TASK, graph_task
from capture.torch_private.dynamo import graphs_compiled
from capture.torch_private.threads import others_may_run
from capture.tree.node import Node
from capture.tree.thread_trees import Worker, acting_for, thread_state, tree_for, worker

Result = TypeVar("Result")
_DIFFERENTIATING = ("backward", "vjp")
"""Methods of users' functions that a backward pass runs."""
_DIFFERENTIABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


@define(kw_only=True)
class RegionCall(Call):
    """A call whose body gives a ``ForwardOutputs``."""

    region: Region
    program: SavedGraph | None = None
    """What the gradients of the body's last run are computed with."""
    keeps_program: bool = True
    begun: int | None = None
    """The number of autograd's next node as the body first began."""

    @override
    def run(self, values: tuple[Any, ...] | None = None) -> Any:
        self.begun = torch_autograd.next_number() if self.begun is None else self.begun
        pair = self.region.run(self, self.values if values is None else values)
        pair.begun = self.begun
        self.program = pair.program
        return pair

    @override
    def forget_run(self) -> None:
        super().forget_run()
        self.program = None  # its graph has what the run saved

    @override
    def settle(self, node: Node) -> None:
        assert self.program is not None
        self.region.settle(node, self.program)

    @override
    def place_in_result(self, place: str) -> str:
        return place.replace("output", "output.result", 1)

    @override
    def whole(self, result: ForwardOutputs) -> ForwardOutputs:
        result.program, result.begun = self.program, self.begun
        return result


@define(kw_only=True)
class BackwardCall(Call):
    """A call whose body uses the values of tensors only: their ``.grad`` and hooks do not count as its state."""

    functions: tuple[type, ...]
    """Classes of users whose ``backward`` it runs."""
    kept_by_nodes: tuple[tuple[Any, str], ...]
    """What ``backward`` gets as attributes of its ``ctx``."""

    @override
    def classes(self) -> Sequence[type]:
        return self.functions

    @override
    def further_starts(self) -> Sequence[tuple[Any, str]]:
        return self.kept_by_nodes

    @override
    def unseen_functions(self) -> Sequence[types.FunctionType]:
        """Those of custom operators are functions of torch, which are left out where autograd calls them."""
        if not self.functions:
            return ()
        methods = [getattr(kind, name, None) for kind in self.functions for name in _DIFFERENTIATING]
        return (
            *torch_autograd.LOOKING_UP_BACKWARD,
            *[one for one in methods if isinstance(one, types.FunctionType) and is_library(package_of(one.__module__))],
        )

    @override
    def roots(self, values: tuple[Any, ...] | None = None) -> list[Source]:
        def bare(leaf: Any) -> Any:
            return leaf.detach() if type(leaf) in TENSOR_TYPES and leaf.requires_grad else leaf

        named = {name: replace_leaves(value, bare) for name, value in self.named_values(values).items()}
        roots = snapshot.roots(self.function, self.receiver, named) + self.unreached.roots()
        for kind in self.functions:  # C code calls what they differentiate with
            roots.append(Source("root", kind, None, kind.__qualname__))
            for name in _DIFFERENTIATING:
                method = getattr(kind, name, None)
                if method is not getattr(torch.autograd.Function, name, None):
                    roots += snapshot.roots(method, None, {})
        kept = [Source("call", functools.partial(_itself, value), None, path) for value, path in self.kept_by_nodes]
        return roots + kept


def _itself(value: Any) -> Any:
    return value


_orders: weakref.WeakKeyDictionary[Captured, accumulate_grad.Order] = weakref.WeakKeyDictionary()
"""Of each function: its keys have one region each, and calls of several may be in one backward pass."""


def _order_of(captured: Captured) -> accumulate_grad.Order:
    return _orders.setdefault(captured, accumulate_grad.Order())


class Region:
    """Forward and backward of one entry."""

    def __init__(
        self, captured: Captured, backend: Backend, leaves: Sequence[Leaf], facts: Facts, payoff: Payoff
    ) -> None:  # fmt: skip
        self._captured, self._backend = captured, backend
        self.uses: Sequence[GradientUse] = facts.gradients
        argument_paths = {placeholder.path for placeholder in facts.placeholders if placeholder.kind != "implicit"}
        self._lends = any(use.path not in argument_paths for use in self.uses) and leaf_swap.is_needed(
            torch.device(backend.name)
        )
        """Runs are lent what needs gradients in Python state."""
        self._has_to_be_alone = False
        """Lending in this thread alone does not reach all of it."""
        self.waits: CapturePlan | None = None
        """What was said of calls that had to run eagerly for that."""
        self.obstacle: GradientObstacle | None = None
        self.payoff = payoff
        self._timer: tuple[BackwardTimer, bool] | None = None
        """Of the last call, and whether that was replayed."""
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self._wanted = tuple(index for index, leaf in tensors.items() if leaf.requires_grad)
        devices = {leaf.device for leaf in tensors.values()} | {torch.device("cpu")}
        devices.add(torch.device(backend.name))
        self._empty = {(dtype, device): torch.empty(0, dtype=dtype, device=device)
                       for dtype in _DIFFERENTIABLE for device in devices}  # fmt: skip
        self._accumulates = captured.annotation.gradients == "accumulate"
        self._order = _order_of(captured) if self._accumulates else None
        self._anchor: accumulate_grad.Anchor | None = None
        self._recorded: weakref.WeakKeyDictionary[Pool, dict[Any, SavedGraph]] = weakref.WeakKeyDictionary()
        """By form, one whose body was recorded in that pool: autograd runs a node on the stream it was made on."""
        self._forms: set[Any] = set()
        """The forms of all programs."""
        self._backwards: dict[Any, _Backward] = {}
        """Backward passes, by form of the program and ``_Found.way``."""
        self._found: _Found | None = None
        """What the last backward pass of a recording ran by."""
        self._retired = False
        self._hands_on = False
        """Somebody asks for gradients of results that others are made of, which the kept graph alone knows."""

    def run(self, call: Call, values: tuple[Any, ...]) -> ForwardOutputs:
        """The user's function in grad mode, and its program."""
        watch = run_module.active_watch()
        before = watch.before if watch is not None else snapshot.snapshot(call.roots())
        original = {} if watch is None else {"original": watch.original}
        shares = self._captured.shares_casts
        beside_others = self._lends and others_may_run()
        saver = GraphSaver(
            call, values, before, self._wanted, lends=self._lends, beside_others=beside_others, shares_casts=shares,
            **original,
        )  # fmt: skip
        saver.program.owner = self
        pair = saver.run(values, self._empty)
        self._has_to_be_alone |= beside_others and bool(saver.program.foreign or saver.program.again.blocks)
        self._captured.shares_casts = shares or any(saver.program.casts)
        if watch is not None and watch.trace.reads:
            saver.program.branch = None
        if saver.obstacle:
            self._note_obstacle(f"the body uses {saver.obstacle}")
        return pair

    def has_to_wait(self) -> bool:
        """Whether no run may be watched or recorded now, as another thread would see what is lent to it. Compiled code
        has guards on function modes: it would be compiled anew."""
        return self._lends and (self._has_to_be_alone or graphs_compiled() > 0) and others_may_run()

    def _note_obstacle(self, reason: str) -> None:
        """Have calls to come run eagerly, for this reason."""
        if self.obstacle is None:
            self.obstacle = GradientObstacle(path=None, reason=reason, where=source_location.user_location())
            self._captured.fast_paths.clear()

    def look_for_higher_order(self, result: Any) -> None:
        """Notice where gradients of gradients, or of inner results, are asked for of what an eager run gave: its graph
        is the caller's."""
        region = weakref.ref(self)
        results = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in results if leaf.grad_fn is not None]

        def tell() -> None:
            mine = region()
            if mine is not None:
                mine.note_inner_result()

        look_at_inner = inner_results.watcher(results, tell)

        def look(_: Any) -> None:
            mine = region()
            if torch.is_grad_enabled() and mine is not None:
                mine.note_higher_order()
            look_at_inner()

        for leaf in results:
            torch_autograd.add_prehook(leaf.grad_fn, look)

    def note_inner_result(self) -> None:
        """Gradients of a result are asked for that another result is made of: see ``inner_results``."""
        self._hands_on = True
        self._note_obstacle("gradients are asked for of a result that another result is made of")

    def note_higher_order(self) -> None:
        """A backward pass keeps a graph of its own. As the caller's graph has one node for the whole body, sums of
        gradients of several orders would be made in another order than eager's: calls to come are eager."""
        self._note_obstacle("gradients of its gradients are asked for (create_graph=True)")

    def is_measured(self) -> bool:
        """Whether it is not known yet whether replays pay, and the host's clock tells."""
        return not self._backend.has_own_memory and self.payoff.is_open and current_config().drop_slow

    def time_backward(self, result: Any, leaves: Sequence[Leaf], *, is_replay: bool) -> None:
        """Find out how long the backward pass of this call will take, and how long that of the last one took."""
        if self._timer is not None:
            timer, was_replay = self._timer
            self.payoff.note_backward(timer.stop(), is_replay=was_replay)
            self._timer = None
            if timer.is_blind:
                self.payoff.give_up()
        program = next(
            (
                program_of_shape
                for programs in list(self._recorded.values())
                for program_of_shape in list(programs.values())
            ),
            None,
        )
        if program is not None and self.payoff.is_open:
            results = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
            inputs = [*[leaves[index] for index in self._wanted], *program.now_parameters]
            self._timer = BackwardTimer(results, inputs, own_time), is_replay

    def stop_timing(self) -> None:
        """It is known whether replays pay. A timer that stays looks at all backward passes of the parameters."""
        timed, self._timer = self._timer, None
        if timed is not None:
            timed[0].stop()

    def make_call(self, **parts: Any) -> Call:
        """A call whose body is the forward pass."""
        return RegionCall(region=self, **parts)

    def attach(self, pair: ForwardOutputs, leaves: list[Leaf], node: Node) -> Any:
        """What the C module replayed, with the graph of the caller."""
        if not pair.attached:
            return pair.result
        program = node.program
        result = self.join(pair, leaves, program, is_replay=True)
        if not program.is_kept_apart and program.saves_apart:
            program.is_kept_apart = True
            # a user's function may keep what it saved; so may an island
            if node.outputs is not None and program.needed(leaves) and not program.functions and not node.reads:
                node.outputs.keep_apart()
        return result

    def settle(self, node: Node, program: SavedGraph) -> None:
        """A recording was made of the run that gave the program."""
        node.program, program.branch, program.is_recorded = program, node.reads, True
        pool = tree_for(self._backend, self._captured.pool.number).pool
        self._recorded.setdefault(pool, {})[program.form] = program
        self._found = None
        self._forms.add(program.form)
        program.before_eager = pool.before_eager()
        paths = {id(tensor): path for path, tensor in node.statics.items()}
        program.paths = {
            id(tensor): paths[id(tensor)] for tensor in (*program.parameters, *program.held) if id(tensor) in paths
        }
        program.follow(node.statics)

    def join(
        self, pair: ForwardOutputs, leaves: Sequence[Leaf], program: SavedGraph, *, is_replay: bool, again: bool = False
    ) -> Any:  # fmt: skip
        """The result as part of the caller's graph. The pass has happened: where this fails by a fault of ours, it is
        done ``again``."""
        frame: Frame | None = None
        begun = pair.begun if pair.begun is not None else torch_autograd.next_number()
        try:
            inner, kept = _parted(program, pair, program.needed(leaves), is_replay=is_replay)
            keepers = _keepers(program, pair, inner, kept) if program.groups else None
            inner, kept = (inner, kept) if keepers is None else ((), ())
            for part in self._parts(program, leaves) if program.parts else (None,):
                attached = pair.attached if part is None else [pair.attached[at] for at in part.results]
                frame = Frame(self, program, inner, kept, attached)
                frame.keepers, frame.part = keepers, part
                self._connect(frame, program, pair, leaves, begun, is_replay=is_replay)
            if is_replay and self.is_measured():
                self.time_backward(pair.result, leaves, is_replay=True)
            return pair.result
        except Exception as error:
            if again or not self._goes_on_after(error):
                raise
        if frame is not None and not frame.attached:  # they are part of it
            return pair.result
        return self.join(pair, leaves, program, is_replay=is_replay, again=True)

    @staticmethod
    def _parts(program: SavedGraph, leaves: Sequence[Leaf]) -> Sequence[Part | None]:
        """The parts of results that get nodes of their own; one for all where above the inputs is nothing that a pass
        frees."""
        apart = (at for at in range(len(program.wanted)) if not all(at in part.uses for part in program.parts))
        if any(leaves[program.wanted[at]].grad_fn is not None for at in apart):
            return program.parts
        return (None,)

    def _connect(
        self, frame: Frame, program: SavedGraph, pair: ForwardOutputs, leaves: Sequence[Leaf], begun: int, *,
        is_replay: bool,
    ) -> None:  # fmt: skip
        """Make the frame's results a part of the caller's graph."""
        if program.again.blocks:
            frame.owners = [owner() for owner in program.again.owners]
            frame.states = program.again.states(pair.begin_state, is_replay=is_replay)
        wanted, parameters = [leaves[index] for index in program.wanted], program.now_parameters
        uses = program.now_uses()
        if program.has_casts:
            frame.casts = shared_casts.shared(parameters, program.casts)
            uses = [frame.casts[number] for number in program.used_parameters]
        elif program.casts_alone and shared_casts.meets_others(parameters, program.casts_alone):
            self._note_obstacle("calls of one block of autocast share weights, which is new")
        if program.inner_results:
            frame.results = [
                inner_results.InnerResult(at, edge, weakref.ref(pair.attached[at]))
                for at, edge in program.inner_results
            ]
        # what keepers have may be freed by then
        apart = program.apart if frame.keepers is None else range(len(wanted))
        if apart:
            frame.handles = {
                position: higher_order.handle(wanted[position])
                for position in apart
                if wanted[position].grad_fn is not None
            }
        own_wanted, own_uses = wanted, uses
        if frame.part is not None:
            own_wanted = [wanted[at] for at in frame.part.uses if at < len(wanted)]
            own_uses = [uses[at - len(wanted)] for at in frame.part.uses if at >= len(wanted)]
        if self._order is not None and self._order.is_kept and parameters and self._deposits(program):
            anchor = self._anchor
            if anchor is None:
                anchor = self._anchor = accumulate_grad.Anchor(pair.attached[0].device)
            frame.parameters, frame.anchor, frame.stream = parameters, anchor, anchor.stream_now()
            _apply(frame, *own_wanted, anchor.tensor)
        else:
            _apply(frame, *own_wanted, *own_uses)
        sole_use.follow(frame, begun, wanted[0] if program.repeats_input else None)

    def look_at_order(self, parameters: Sequence[torch.Tensor]) -> None:
        """In a backward pass that adds to ``.grad``. Where others do, too, calls to come go through autograd."""
        if self._order is None or not self._order.is_kept:
            return
        shared_with = self._order.broken_by(parameters)
        if shared_with is None:
            return
        self._order.is_kept = False
        captured = self._captured
        order = GradientOrder(shared_with=shared_with, where=captured.annotation.defined_at)
        captured.note_findings(compile_plan(captured.annotation, captured.bare_facts(gradient_order=order)))
        captured.log.add("plan", f"gradients go through autograd: {shared_with} has the same parameters in one pass")

    def _deposits(self, program: SavedGraph) -> bool:
        if program.deposits is None:
            program.deposits = not program.has_casts and accumulate_grad.are_leaves(program.now_parameters)
        return program.deposits and accumulate_grad.may_deposit()

    def gradients(
        self, program: SavedGraph, tensors: Sequence[Any], grads: Sequence[Any],
        buffers: Sequence[Any] | None = None, *, at_home: bool, in_one: bool = False,
    ) -> Sequence[Any]:  # fmt: skip
        """The backward pass of one call. ``at_home``: in the thread of the forward pass, or while that waits for it.
        ``buffers``: of the parameters, to which their gradients are added; None: all are given back as they are.
        ``in_one``: the gradients of its one input may come as their sum (``sole_use``)."""
        is_looked_at = torch.is_anomaly_enabled()  # autograd looks at what each node gives
        if self._retired or is_looked_at or self._hands_on or program.again.is_of_one_run or program.branch is None:
            return _run_plainly(program, tensors, grads, buffers, at_home=at_home)
        pool, found = tree_for(self._backend, self._captured.pool.number).pool, self._found
        recorded = None if found is None else found.recorded_of(pool, program, (buffers is not None, in_one))
        if found is not None and recorded is not None:  # neither a form is hashed nor a pool looked up
            return found.backward(recorded, tensors, grads, buffers or ())
        way = buffers is not None, in_one
        backward = self._backwards.get((program.form, way))
        if backward is None:
            made = _Backward(self._captured, program, accumulates=buffers is not None, in_one=in_one)
            backward = self._backwards.setdefault((program.form, way), made)
        recorded = self._recorded.get(pool, {}).get(program.form) if program.is_recorded else None
        if recorded is None and (backward.was_called or program.form in self._forms):
            return _run_plainly(program, tensors, grads, buffers, at_home=at_home)
        if recorded is not None:
            refs = weakref.ref(pool), weakref.ref(program), weakref.ref(recorded)
            self._found = _Found(backward, way, *refs)
        return backward(recorded or program, tensors, grads, buffers or ())

    def may_run_plainly(self, program: SavedGraph, error: Exception) -> bool:
        """Whether something of this library went wrong in a backward pass, which changes nothing but what it gives: it
        may run once more, as it is. What autograd itself raised, as it does without us, comes out; so does what comes
        of a pass with collectives, which other ranks would take for those of the next one."""
        of_autograd = program.raised == id(error) and not fault.is_ours(error)
        communicates = any(backward.communicates for backward in list(self._backwards.values()))
        if of_autograd or program.donates or program.again.runs_once or communicates:
            return False
        return self._goes_on_after(error)

    def _goes_on_after(self, error: Exception) -> bool:
        """Whether the call goes on after this error, which is told then: it is none that somebody asked for."""
        asked_for = isinstance(error, CaptureError) and not isinstance(error, CaptureBug)
        if asked_for or is_interrupt(error) or current_config().strict:
            return False
        fault.tell(self._captured, error)
        return True

    def entries(self) -> list[Entry]:
        """The entries of all backward passes."""
        return [entry for backward in list(self._backwards.values()) for entry in backward.captured.entries()]

    def forget_all(self) -> None:
        """Drop all that was recorded of the function, if that did not happen yet."""
        if not self._retired:
            self._captured.log.add("drop", "a parameter has another shape")
            self._captured.retire()

    def retire(self) -> None:
        """The forward pass was forgotten. Backward passes still to come run eagerly."""
        self._retired = True
        for backward in list(self._backwards.values()):
            backward.captured.retire()
        self._backwards.clear()
        self._found = None


def finish(result: Any, leaves: Sequence[Leaf]) -> Any:
    """What a call gave, if it was a forward pass as part of the caller's graph."""
    if type(result) is not ForwardOutputs:
        return result
    if not result.attached:
        return result.result
    program = result.program
    assert program is not None
    return program.owner.join(result, leaves, program, is_replay=result.is_replay)


def _parted(
    program: SavedGraph, pair: ForwardOutputs, needed: Sequence[Any], *, is_replay: bool
) -> tuple[Sequence[Any], Sequence[Any]]:
    """What the call's node keeps itself, and what goes through autograd, which frees it at the right time; there has to
    be some of that."""
    if program.again.blocks:
        return program.parted([*pair.saved, *needed])
    if program.saves_apart is None and is_replay:
        program.saves_apart = torch_autograd.TELLS_KEEP_GRAPH and lies_apart(pair)
    if is_replay and program.saves_apart and needed:
        return pair.saved, needed
    return (), [*pair.saved, *needed]


def _keepers(program: SavedGraph, pair: ForwardOutputs, inner: Sequence[Any], kept: Sequence[Any]) -> Keepers:
    """Of tensors in Python state a pass always gets some: a recording is bound to them."""
    num_held = len(program.held)
    filling = [*[None] * (len(inner) + len(kept) - num_held), *kept[len(kept) - num_held :]]
    return Keepers.of(program.groups, inner, kept, pair.attached, filling)


def _run_plainly(
    program: SavedGraph, tensors: Sequence[Any], grads: Sequence[Any], buffers: Sequence[Any] | None, *, at_home: bool
) -> Sequence[torch.Tensor | None]:
    """The thread of the forward pass, unless it waits for this, may be capturing the stream of a recorded program."""
    native.tell_uses(tensors)
    return _without_captures(functools.partial(_computed, program, tensors, grads, buffers), at_home=at_home)


def _without_captures(function: Callable[[], Result], *, at_home: bool) -> Result:
    """Call it while the thread of the forward pass captures nothing."""
    return function() if at_home else locked_or(function, function)


def _computed(
    program: SavedGraph, tensors: Sequence[Any], grads: Sequence[Any], buffers: Sequence[Any] | None
) -> tuple[Any, ...]:
    return _added(program, program.gradients(tensors, grads), tensors, grads, buffers)


def _added(
    program: SavedGraph, gradients: tuple[Any, ...], tensors: Sequence[Any], grads: Sequence[Any],
    buffers: Sequence[Any] | None,
) -> tuple[Any, ...]:  # fmt: skip
    if buffers is None:
        return gradients
    wanted, mine = gradients[: len(program.wanted)], program.summed(gradients[len(program.wanted) :])
    used = (*tensors[: len(program.checked)], *grads, *wanted)
    made = accumulate_grad.accumulated(program.parameters, mine, buffers, used)
    return (*wanted, *made)


@frozen(eq=False)
class _Found:
    """The backward pass for a program in a pool, and the program that was recorded there. It keeps none of them."""

    backward: _Backward
    way: tuple[bool, bool]
    """Whether it accumulates, and gives the gradients of its input in one."""
    pool: weakref.ref[Pool]
    program: weakref.ref[SavedGraph]
    recorded: weakref.ref[SavedGraph]

    def recorded_of(self, pool: Pool, program: SavedGraph, way: tuple[bool, bool]) -> SavedGraph | None:
        """The recorded program, if it was found for these."""
        is_same = self.program() is program and self.pool() is pool and self.way == way
        return self.recorded() if is_same else None


class _Backward:
    """The backward pass of programs of one form, as a captured function of the tensors that it takes."""

    def __init__(self, forward: Captured, program: SavedGraph, *, accumulates: bool, in_one: bool) -> None:
        self._accumulates, self._in_one, self.was_called = accumulates, in_one, False
        self.communicates = False
        """A run of the backward pass was seen to use collectives."""
        self._programs = weakref.WeakKeyDictionary[Worker, weakref.ref[SavedGraph]]()
        """The program whose backward pass a thread runs now, or ran last. On accelerators autograd's threads run it,
        and the thread that they work for asks which one it was. A program that was not recorded ends with its call: its
        graph would keep the nodes of leaves, on the stream of that call."""
        self._latest: tuple[Callable[[], Worker | None], Callable[[], SavedGraph | None]] = _nothing, _nothing
        """The thread that was noted last, and its program."""
        names = [f"saved_{index}" for index in range(program.num_saved)]
        names += [f"input_{index}" for index in range(len(program.given))]
        held = [f"held_{index}" for index in range(len(program.held))]
        owners = [f"owner_{index}" for index in range(len(program.again.owners))]
        buffers = [f"buffer_{index}" for index in range(len(program.parameters) if accumulates else 0)]
        names += [*held, *owners, *[f"gradient_{index}" for index in range(len(program.outputs))], *buffers]
        signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names])
        annotation = evolve(
            forward.annotation, parameters=tuple(names), static=(*held, *buffers), guards=(), warmup=1,
            # autograd may use them on any stream, and tells the allocator alone
            outputs="preserve" if accumulates else "clone",
        )  # fmt: skip
        self.captured = Captured(
            annotation, self._run, make_binder(signature), Shortcuts(), forward.dispatch, log=forward.log,
            findings=forward.findings, keeps_plans=False, is_backward=True,
            deposits=self._receivers if accumulates else None, make_call=self._make_call, pool=forward.pool,
        )  # fmt: skip

    def __call__(
        self, program: SavedGraph, tensors: Sequence[Any], grads: Sequence[Any], buffers: Sequence[Any]
    ) -> Sequence[Any]:
        here, self.was_called = worker(), True
        if self._latest[0]() is not here or self._latest[1]() is not program:
            self._programs[here] = noted = weakref.ref(program)
            self._latest = weakref.ref(here), noted
        values = (*tensors, *grads, *buffers)
        result = self.captured.straight(*values)
        if result is MISS:
            native.tell_uses(tensors)
            inputs = (*tensors[: len(program.checked)], *grads, *buffers)
            is_batch = not all(
                input_ is None or capabilities.has_memory(input_) for input_ in inputs
            )  # ``is_grads_batched``
            result = self._run(*values) if is_batch else self.captured.dispatch(self.captured, values, {})
        gradients: Sequence[Any] = result
        return gradients

    def _make_call(self, **parts: Any) -> Call:
        program = self._program()
        return BackwardCall(functions=program.functions, kept_by_nodes=program.kept_by_nodes, **parts)

    def _program(self) -> SavedGraph:
        program = self._programs[worker()]()
        assert program is not None  # its call goes on
        return program

    def _receivers(self, positions: Sequence[int]) -> Sequence[torch.Tensor]:
        """The parameters that get the results at these positions, if all are gradients of some. Nobody knows once the
        program is gone: other code holds what it gave."""
        held = self._programs.get(worker())  # a collection that ends all this may have cleared it before
        program = held() if held is not None else None
        if program is None or min(positions) < (first := len(program.wanted)):
            return ()
        return [program.now_parameters[position - first] for position in positions]

    def _run(self, *values: Any) -> tuple[Any, ...]:
        program = self._program()
        end = len(values) - len(program.parameters) if self._accumulates else len(values)
        begin = end - len(program.outputs)
        buffers = values[end:] if self._accumulates else None
        try:
            made: tuple[Any, ...] = inlined(_computed, program, values[:begin], values[begin:end], buffers)
            if self._in_one:
                count = len(program.wanted)
                made = (*program.in_one(made[:count]), *made[count:])
        finally:
            watch = run_module.active_watch()
            self.communicates = self.communicates or (watch is not None and bool(watch.trace.collectives))
        return made


_NO_HANDLES: Mapping[int, torch.Tensor] = {}


def _nothing() -> None:
    """Gives None: no graph of gradients is alive."""


class Frame:
    """One call of the function in the caller's graph."""

    __slots__ = (
        "__weakref__",
        "_forward_thread",
        "_program",
        "_region",
        "anchor",
        "attached",
        "casts",
        "handles",
        "higher",
        "inner",
        "is_sole_use",
        "keepers",
        "made_for_it",
        "number",
        "owners",
        "parameters",
        "part",
        "results",
        "states",
        "stream",
        "to_save",
        "was_run",
    )

    def __init__(
        self, region: Region, program: SavedGraph, inner: Sequence[Any], kept: Sequence[Any], attached: Sequence[Any]
    ) -> None:
        self._region, self._program, self._forward_thread = region, program, thread_state()
        self.inner = inner
        """Tensors that no user gets: kept until a backward pass has run without keeping the graph."""
        self.to_save, self.attached = kept, attached
        self.part: Part | None = None
        """The results that its node gives, if these are not all."""
        self.keepers: Keepers | None = None
        """Keep what is saved, where results can be differentiated one after another."""
        self.handles: Mapping[int, torch.Tensor] = _NO_HANDLES
        """Have the places of inputs, by position, in the caller's graph that the node does not save itself."""
        self.casts: Sequence[torch.Tensor] = ()
        """Have the places of weights that autocast cast."""
        self.higher: Callable[[], _Higher | None] = _nothing
        """The gradients of its gradients, while a graph of those is alive, which knows this node."""
        self.anchor: accumulate_grad.Anchor | None = None
        """Stands for ``parameters``, to whose ``.grad`` the backward pass adds."""
        self.parameters: Sequence[torch.Tensor] = ()
        self.owners: Sequence[Any] = ()
        """Objects that blocks under checkpoints need."""
        self.states: Sequence[tuple[torch.Generator, torch.Tensor]] = ()
        """Generators, and the states from which those blocks draw."""
        self.results: Sequence[inner_results.InnerResult] = ()
        """Those that another result is made of."""
        self.was_run = False
        self.number = NO_NUMBER
        self.made_for_it: weakref.ref[torch.Tensor] | None = None
        self.is_sole_use = False
        """As in ``sole_use.CallInGraph``."""
        self.stream: int | None = None
        """The one of the forward pass, on which autograd runs the backward pass, too; None: nobody asks."""

    def gradients(self, node: Any, tensors: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """The backward pass, in the tree that the forward pass ran in. ``node``: of the caller's graph."""
        if self.results and not torch.is_grad_enabled():
            asked_for = [result for result in self.results if result.is_asked_for()]
            if asked_for:
                return self._handing_on(asked_for, node, tensors, grads)
        if self._program.donates and torch_autograd.keeps_graph():
            raise RuntimeError(torch_autograd.DONATED_ERROR)
        if self.was_run and self._program.again.runs_once:
            raise RuntimeError(checkpoints.RUN_ONCE_ERROR)
        self.was_run = True
        self._program.check()
        if torch.is_grad_enabled():
            return self._with_graph(node, tensors, grads)
        if self.anchor is not None:
            return self._accumulate(self.anchor, node, tensors, grads)
        try:
            with acting_for(self._forward_thread) as is_there:
                return self._of_inputs(tensors, grads, None, at_home=is_there)
        except Exception as error:
            with using(self._forward_thread.config):  # a thread of autograd has none of its own
                may_run_plainly = self._region.may_run_plainly(self._program, error)
            if not may_run_plainly:
                raise
        with drawing_from(self.states):
            return _run_plainly(self._program, self._all(tensors), grads, None, at_home=False)

    def all_results(self, grads: Sequence[Any]) -> Sequence[Any]:
        """The gradients of all results, of those that come to its node."""
        assert self.part is not None
        return self.part.widened(grads, self.part.results, len(self._program.outputs))

    def own_uses(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """What its node gives of all gradients. That of an anchor is the last."""
        assert self.part is not None
        count = len(self._program.uses) if self.anchor is None else len(self._program.wanted)
        return *[gradients[at] for at in self.part.uses if at < count], *gradients[count:]

    def leave_out_hooks(self, node: Any, grads: Sequence[Any]) -> None:
        """As far as leaves have some to which the results that these gradients come to do not lead."""
        program = self._program
        if not program.reaching or self.anchor is not None or all(grad is not None for grad in grads):
            return
        come = sum(1 << at for at, grad in enumerate(grads) if grad is not None)
        is_reached = [bool(program.reaching[number] & come) for number in program.uses]
        unreached.leave_out_hooks(self._above(node), is_reached)

    def _above(self, node: Any) -> Sequence[tuple[Any, int]]:
        """What is above each use of an input in the caller's graph."""
        above: Sequence[tuple[Any, int]] = node.next_functions
        if self.part is None:
            return above
        return self.part.widened(above, self.part.uses, len(self._program.uses), (None, 0))

    def _handing_on(
        self, asked_for: Sequence[inner_results.InnerResult], node: Any, tensors: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        """As ``gradients``, where somebody asks for those of results that others are made of."""
        self._region.note_inner_result()
        results, self.results = self.results, ()
        try:
            with inner_results.handing_on(asked_for, grads):
                return self.gradients(node, tensors, grads)
        finally:
            self.results = results

    def _with_graph(self, node: Any, tensors: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """As ``gradients``, as part of the caller's graph, so that gradients of the gradients can be asked for."""
        program, count = self._program, len(self._program.wanted)
        native.tell_uses(self.inner)
        self._region.note_higher_order()
        saved = tensors[len(self.inner) :]
        sources = [*saved, *program.now_parameters, *self.casts]
        if self.anchor is None:
            inputs = higher_order.inputs_of(self._above(node)[: len(program.uses)], sources, self.handles)
        else:
            self.anchor.check()
            uses = [self.parameters[number] for number in program.used_parameters]
            inputs = [*higher_order.inputs_of(self._above(node)[:count], sources, self.handles), *uses]
        higher = self.higher() or _Higher(node)
        self.higher = weakref.ref(higher)
        order = higher_order.Order(higher, self.inner, len(saved), len(inputs), ())
        made = higher_order.apply(order.after(grads), [*saved, *inputs], [grad for grad in grads if grad is not None])
        made = made[: len(inputs)]
        if self.anchor is None:
            return made
        accumulate_grad.through_autograd(self.parameters, program.summed(made[count:]), keeps_graph=True)
        return (*made[:count], self.anchor.gradient())

    def _of_inputs(
        self, tensors: Sequence[Any], grads: Sequence[Any], buffers: Sequence[Any] | None, *, at_home: bool
    ) -> Sequence[Any]:
        if self.higher is _nothing and not self.states:  # mostly: nothing has to be put back
            tensors = self._all(tensors) if self._program.again.blocks else tensors
            in_one = self.is_sole_use
            return self._region.gradients(self._program, tensors, grads, buffers, at_home=at_home, in_one=in_one)
        higher = self.higher()
        later = () if higher is None else higher.take()
        with drawing_from(self.states):
            tensors = self._all(tensors)
            if not later:
                return self._region.gradients(self._program, tensors, grads, buffers, at_home=at_home)
            native.tell_uses(tensors)
            of_both = functools.partial(self._program.gradients_of_both, tensors, grads, later)
            gradients = _without_captures(of_both, at_home=at_home)
            return _added(self._program, gradients, tensors, grads, buffers)

    def _all(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """What the program takes, in its order."""
        return (*self._program.in_order(tensors), *self.owners) if self._program.again.blocks else tensors

    def of_order(self, tensors: Sequence[Any], orders: Sequence[Any], **asked: bool) -> Sequence[Any]:
        """See ``higher_order.Body.gradients_of_order``."""
        native.tell_uses(tensors)
        with acting_for(self._forward_thread) as is_there:
            return _without_captures(lambda: self._of_order(tensors, orders, **asked), at_home=is_there)

    def _of_order(self, tensors: Sequence[Any], orders: Sequence[Any], **asked: bool) -> Sequence[Any]:
        with drawing_from(self.states):
            return self._program.gradients_of_order(self._all(tensors), orders, **asked)

    def _accumulate(
        self, anchor: accumulate_grad.Anchor, node: Any, tensors: Sequence[Any], grads: Sequence[Any]
    ) -> Sequence[Any]:
        anchor.check()
        parameters, count = self.parameters, len(self._program.wanted)
        self._region.look_at_order(parameters)
        buffers = accumulate_grad.buffers_of(parameters)
        with acting_for(self._forward_thread) as is_there:
            gradients = self._of_inputs(tensors, grads, buffers, at_home=is_there)
        if buffers is None:
            accumulate_grad.through_autograd(parameters, self._program.summed(gradients[count:]))
            return (*gradients[:count], anchor.gradient())
        accumulate_grad.put(parameters, gradients[count:])
        given = zip(gradients[:count], self._above(node), strict=False)  # those that are behind it are more
        return (*[None if one is None else self._handed_on(one, to) for one, to in given], anchor.gradient())

    def _handed_on(self, gradient: torch.Tensor, receiver: tuple[Any, int]) -> torch.Tensor:
        """A copy, as autograd may use it on any stream and tells the allocator alone. But a region that runs on the
        same stream, in the same tree, gets the gradient itself: its replay comes after this one and before the next."""
        frame_of_receiver = getattr(receiver[0], "frame", None)
        is_near = (
            type(frame_of_receiver) is Frame
            and frame_of_receiver.stream == self.stream
            and frame_of_receiver._forward_thread.trees is self._forward_thread.trees
        )
        return gradient if is_near else gradient.clone()


class _Higher:
    """Gradients of the gradients of one call."""

    __slots__ = ("__weakref__", "_later", "_node", "_task")

    def __init__(self, node: Any) -> None:
        self._node = node
        self._task = NO_TASK
        """The run of autograd that came to the results last."""
        self._later: dict[int, list[Any]] = {}
        """By run of autograd, gradients of both orders that wait until it comes to the results."""

    def gradients_of_order(self, tensors: Sequence[Any], orders: Sequence[Any], **asked: bool) -> Sequence[Any]:
        frame: Frame = self._node.frame
        return frame.of_order(tensors, orders, **asked)

    def puts_off(self, orders: Sequence[Any]) -> bool:
        task, will_execute = graph_task(), torch_autograd.will_execute
        if len(orders) != 2 or task in (NO_TASK, self._task) or will_execute is None or not will_execute(self._node):
            return False
        self._later.setdefault(task, []).append(orders)
        return True

    def take(self) -> Sequence[Any]:
        """What waited for autograd to come to the results, where it is now."""
        self._task = graph_task()
        return self._later.pop(self._task, ())


class _Gradients(torch.autograd.Function):
    """The node in the caller's graph. It saves what eager saves and the user can write, so that autograd itself frees
    and checks it."""

    @staticmethod
    @override
    def forward(ctx: Any, frame: Frame, *inputs: Any) -> Any:
        ctx.frame, ctx.has_saved = frame, bool(frame.to_save)
        ctx.set_materialize_grads(False)
        frame.number = number_of(ctx)
        ctx.save_for_backward(*frame.to_save)
        attached, frame.attached, frame.to_save = frame.attached, (), ()
        return tuple(attached)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        frame: Frame = ctx.frame
        keepers, part = frame.keepers, frame.part
        grads = grads if part is None else tuple(frame.all_results(grads))
        saved: Sequence[Any] = ctx.saved_tensors if ctx.has_saved else ()  # raises what eager raises
        if keepers is not None:
            keeps = torch.is_grad_enabled()
            saved = keepers.tensors(grads, every=not keeps and frame.higher() is not None)
            if keeps:  # they become a part of the caller's graph
                native.tell_uses(saved)
        found = frame.gradients(ctx, (*frame.inner, *saved), grads)
        frame.leave_out_hooks(ctx, grads)
        if frame.inner and torch_autograd.TELLS_KEEP_GRAPH and not torch_autograd.keeps_graph():
            frame.inner = ()
        if keepers is not None:
            keepers.let_go(grads)
        return (None, *(found if part is None else frame.own_uses(found)))


_apply = capabilities.function_apply(_Gradients)
