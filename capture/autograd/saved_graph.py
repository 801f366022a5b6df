"""The autograd graph of a body, kept to compute gradients of calls that only replayed the body.

A backward pass needs the nodes of the forward pass and the tensors they saved. A replay runs no Python and makes no
nodes; but the nodes are the same in every call, and only the tensors are others. So the graph of the run that was
recorded is kept without its tensors: where autograd saves one, hooks put a ``SavedTensor`` in its place, which tells
where that tensor is found in each call. It was made by the body (then it is handed out beside the results), or is part
of an argument, or of a tensor in Python state. Running the graph later with the tensors of a call gives its gradients,
and recording that run gives the backward recording.

Invariant: the kept graph keeps no memory alive, and ends at tensors of its own. Parameters are lent to the body under
other autograd nodes (``leaf_swap``), as the node of a leaf belongs to the stream of its first use, which a capture
must not touch. A saved tensor that the body wrote afterwards is told (``modified``) and raises as eager does: without
that a gradient would be computed from values that the forward pass never saw.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from attrs import field
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from capture.autograd import inner_results, leaf_swap, live_graph, unreached
from capture.autograd.leaf_swap import Lent, SavedLeaves, lent, lent_in_this_thread
from capture.autograd.philox_seeds import may_be_seed, on_host, read_seeds
from capture.autograd.recomputation import Blocks, Recomputation
from capture.autograd.result_groups import FREED, Group, Part, can_keep, groups_of, parts_of
from capture.core.data import define
from capture.engines.base import Geometry
from capture.key import pytree
from capture.key.packages import package_of
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES, result_leaves
from capture.key.tensor_kind import refuses
from capture.observe import shared_casts
from capture.observe.gradient_uses import begin_differentiating, end_differentiating, ends_of, hooks_off
from capture.observe.probes.host_reads import no_gradient_reads
from capture.state import body_run
from capture.state.call import Call
from capture.state.diff import changes
from capture.state.snapshot import Change, Snapshot, carries_graph
from capture.state.stand_ins import StandIns
from capture.torch_private import autocast
from capture.torch_private.autograd import (
    add_hook,
    add_prehook,
    donation_allowed,
    function_of,
    nodes_above,
    stale_streams_overridden,
    unpack_saved,
    writes_saved_tensors,
)
from capture.torch_private.capabilities import NO_TASK, graph_task, unseen
from capture.torch_private.checkpoints import without_recomputing
from capture.torch_private.cuda import is_capturing
from capture.torch_private.devices import is_capturing_now
from capture.torch_private.subclasses import is_wrapper
from capture.tree.outputs import Alias


class _ForwardOutputs(NamedTuple):
    result: Any
    """The user's result, without a graph."""
    attached: tuple[torch.Tensor, ...]
    """Tensors in it that need gradients."""
    saved: tuple[torch.Tensor, ...]
    """Made by the body and needed by its backward pass."""


class ForwardOutputs(_ForwardOutputs):
    """The outputs of a body whose results need gradients."""

    program: SavedGraph | None = None
    """What its gradients are computed with: that of the run, or of the recording, which gave this. No member of the
    tuple, so that no recording hands it out."""
    is_replay: bool = False
    begin_state: torch.Tensor | None = None
    """Of a replay whose backward pass may draw again: what the generator of the CPU drew from as it began."""
    begun: int | None = None
    """Of a run: the number of autograd's next node as it began."""


def _plus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, as autograd adds them: None is no gradient."""
    return other if one is None else one if other is None else one + other


def lies_apart(pair: ForwardOutputs) -> bool:
    """Whether nothing that the user gets shares memory with what the backward pass needs: no write of the user's could
    spoil it, which autograd would have to find."""
    tensors = [leaf for _, leaf in result_leaves(pair.result) if isinstance(leaf, torch.Tensor)]
    given = {one.untyped_storage()._cdata for one in (*tensors, *pair.attached)}
    return not any(one.untyped_storage()._cdata in given for one in pair.saved)


class SavedTensor:
    """Stands for a saved tensor in the graph: how to find it among the tensors of a call."""

    __slots__ = (
        "__weakref__",
        "alias",
        "conj",
        "index",
        "is_checked",
        "is_made_again",
        "is_seed",
        "neg",
        "stays",
        "tensor",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, *, is_made_again: bool = False, is_checked: bool = True) -> None:
        self.tensor: torch.Tensor | None = tensor
        """The saved tensor itself, while the body runs."""
        self.is_made_again, self.is_checked = is_made_again, is_checked
        """Of a block under a checkpoint, which is run again. And: autograd raises where it is written."""
        self.version = tensor._version
        self.alias: Alias | None = None
        self.index = -1
        self.conj = self.neg = False
        self.is_seed = False
        """From what an attention kernel drew, which reads this on the host unless it is captured."""
        self.stays = False
        """The graph keeps the tensor itself, as it has no memory that could be told of: it is of this run alone."""


class Pass:
    """One backward pass through a graph; several threads may run such passes at once."""

    __slots__ = ("again", "come", "more", "task", "tensors", "thread")

    def __init__(self, tensors: Sequence[torch.Tensor], again: Mapping[Any, torch.Tensor]) -> None:
        self.tensors, self.again = tensors, again
        """Of the call. And what blocks under checkpoints saved as they ran again, by ``SavedTensor``."""
        self.come: set[int] = set()
        """Inputs of the body for which a gradient has come."""
        self.more: dict[int, list[torch.Tensor]] = {}
        """Further gradients of inputs that are used several times, in autograd's order."""
        self.thread, self.task = threading.get_ident(), NO_TASK
        """The thread that began it, and the run of autograd that it is, once autograd has begun."""


class Passes:
    """The backward passes that run through a graph now."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: list[Pass] = []

    @contextlib.contextmanager
    def __call__(self, tensors: Sequence[torch.Tensor], again: Mapping[Any, torch.Tensor]) -> Iterator[Pass]:
        """A pass runs in the block, with the tensors of its call."""
        running = Pass(tensors, again)
        self._running.append(running)
        try:
            yield running
        finally:
            self._running.remove(running)

    def current(self) -> Pass:
        """The pass for which autograd asks now. It asks in the thread that began the pass, or in a thread of its own:
        then it is the one pass that autograd has not asked for yet."""
        running = list(self._running)
        task = graph_task()
        if task != NO_TASK:
            for backward in running:
                if backward.task == task:
                    return backward
            running = [backward for backward in running if backward.task == NO_TASK]
        here = threading.get_ident()
        mine = [backward for backward in running if backward.thread == here] or running
        mine[-1].task = task
        return mine[-1]


class SeveralUses:
    """Hook of a node that uses inputs of the body which others use, too. Autograd would add their gradients up at once;
    the caller's adds them to those of uses outside, one after the other. So the first one goes on, and those that come
    later are put aside."""

    __slots__ = ("_inputs", "_passes")

    def __init__(self, passes: Passes, inputs: dict[int, int]) -> None:
        self._passes = passes
        self._inputs = inputs
        """Numbers of inputs of the body, by position among the inputs of the node."""

    def __call__(self, grads: Sequence[torch.Tensor | None], _: object) -> tuple[torch.Tensor | None, ...]:
        now, kept = self._passes.current(), list(grads)
        for position, number in self._inputs.items():
            grad = grads[position]
            if grad is None:
                continue
            if number in now.come:
                now.more.setdefault(number, []).append(grad)
                kept[position] = None
            now.come.add(number)
        return tuple(kept)


class SavedTensorHooks:
    """Hooks on saved tensors that put ``SavedTensor``s in their places. The graph refers to this object, and to nothing
    that refers to it."""

    __slots__ = ("_saved_tensors", "blocks", "is_marking", "noted", "passes")

    def __init__(self) -> None:
        self.passes = Passes()
        self.is_marking = False
        """Whether ``unpack`` is called to find seeds of attention kernels, not for a backward pass."""
        self.noted: list[SavedTensor] | None = None
        """What was unpacked, where ``unpack`` is called to find who saved what."""
        self._saved_tensors: list[weakref.ref[SavedTensor]] = []
        """The ``SavedTensor``s of the body's run. After the run parts of its graph may be gone."""
        self.blocks: Blocks | None = None
        """While the body runs: the blocks that it runs under checkpoints."""

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Autograd saves a tensor: gives the ``SavedTensor`` that the graph keeps instead."""
        block = None if self.blocks is None else self.blocks.current
        saved_tensor = self.save(tensor, is_made_again=block is not None)
        if block is not None:
            block.add(saved_tensor, tensor)
        return saved_tensor

    def save(self, tensor: torch.Tensor, **told: bool) -> SavedTensor:
        """Note one more tensor that the backward pass needs."""
        saved_tensor = SavedTensor(tensor, **told)
        self._saved_tensors.append(weakref.ref(saved_tensor))
        return saved_tensor

    def saved_tensors(self) -> list[SavedTensor]:
        """The ``SavedTensor``s that the graph still has."""
        return [saved_tensor for one in self._saved_tensors if (saved_tensor := one()) is not None]

    def end_run(self) -> None:
        """From now on the graph keeps no memory."""
        for saved_tensor in self.saved_tensors():
            saved_tensor.tensor = saved_tensor.tensor if saved_tensor.stays else None
        self._saved_tensors.clear()

    def check(self) -> None:
        """Raises what eager raises where a tensor was written that the graph, used as it ran, needs."""
        for saved_tensor in self.saved_tensors():
            tensor = saved_tensor.tensor
            if tensor is not None and saved_tensor.is_checked and tensor._version != saved_tensor.version:
                raise RuntimeError(_WRITTEN)

    def unpack(self, saved_tensor: SavedTensor) -> torch.Tensor:
        """The tensor of this call that a ``SavedTensor`` stands for."""
        if self.noted is not None and saved_tensor.tensor is not None:
            self.noted.append(saved_tensor)
            return saved_tensor.tensor
        if saved_tensor.tensor is not None:
            saved_tensor.is_seed = self.is_marking and may_be_seed(saved_tensor.tensor)
            return saved_tensor.tensor if self.is_marking else saved_tensor.tensor.detach()
        now = self.passes.current()
        return now.again[saved_tensor] if saved_tensor.is_made_again else self.built(saved_tensor, now.tensors)

    def built(self, saved_tensor: SavedTensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, among these, that a ``SavedTensor`` stands for."""
        assert saved_tensor.alias is not None
        saved = tensors[saved_tensor.index]
        if saved is None:  # of results whose own pass has run
            raise RuntimeError(FREED)
        tensor = saved_tensor.alias.build(saved.detach())
        tensor = tensor.conj() if saved_tensor.conj else tensor
        tensor = tensor.neg() if saved_tensor.neg else tensor
        return on_host(tensor) if saved_tensor.is_seed and not is_capturing() else tensor

    def saved_with(self, node: Any) -> list[SavedTensor]:
        """What the node saved. Raises ``LookupError`` where nobody knows."""
        self.noted = []
        try:
            unpack_saved(node)
            return self.noted
        finally:
            self.noted = None

    def saved_by(self, node: Any) -> list[int]:
        """Positions of what the node saved. Raises ``LookupError`` where nobody knows."""
        positions = [saved_tensor.index for saved_tensor in self.saved_with(node)]
        if any(position < 0 for position in positions):
            raise LookupError
        return positions

    def mark_seeds(self, ends: Sequence[torch.Tensor]) -> None:
        """Find what was drawn from by attention kernels that were captured: such seeds lie on the device."""
        if any(may_be_seed(saved_tensor.tensor) for saved_tensor in self.saved_tensors()):
            self.is_marking = True
            read_seeds(ends)
            self.is_marking = False


@define(eq=False)
class SavedGraph:
    """Gradients of one body. Tensors it needs, in order: ``saved``, then arguments, then tensors in Python state. Where
    blocks of it run again, then the ``owners`` of those, which are no tensors."""

    owner: Any = None
    """Makes the results of calls part of the callers' graphs."""
    hooks: SavedTensorHooks = field(factory=SavedTensorHooks)
    outputs: tuple[GradientEdge, ...] = ()
    inner_results: tuple[tuple[int, GradientEdge], ...] = ()
    """Places of outputs that others are made of, with their positions."""
    groups: tuple[Group, ...] = ()
    """Of what is saved, where some results can be differentiated one after another."""
    parts: tuple[Part, ...] = ()
    """Of the results, where some lead to other inputs than others."""
    reaching: tuple[int, ...] = ()
    """Of each of ``inputs``, bit by bit, the results that lead to it. Empty where all lead to all."""
    inputs: tuple[GradientEdge, ...] = ()
    """Where the gradients of arguments and then of ``parameters`` are computed."""
    uses: tuple[int, ...] = ()
    """The inputs again, by number, each as often as the body uses it: gradients are given use by use, in the order in
    which autograd comes to the uses, for the caller's graph to add them up."""
    wanted: tuple[int, ...] = ()
    """Positions of arguments, use by use."""
    parameters: tuple[torch.Tensor, ...] = ()
    casts: tuple[torch.dtype | None, ...] = ()
    """Of each of ``parameters`` that autocast casts, for all calls in a block around: what to. Its gradient is the
    cast's."""
    casts_alone: tuple[torch.dtype | None, ...] = ()
    """As ``casts``, where the casts are the body's own: no other call of a block was seen to use them."""
    used_parameters: tuple[int, ...] = ()
    """Which of ``parameters``, by position, use by use."""
    given: tuple[int, ...] = ()
    """Positions of arguments that the backward pass needs."""
    held: tuple[torch.Tensor, ...] = ()
    """Tensors in Python state that the backward pass needs."""
    views: tuple[int, ...] = ()
    """Which of ``given`` and ``held``, by position, were saved as views: those keep memory that ``.data =`` takes from
    the tensor."""
    apart: tuple[int, ...] = ()
    """Which of ``wanted``, by position, are not among ``given`` as they are."""
    functions: tuple[type, ...] = ()
    """Classes of users whose ``backward`` the graph runs."""
    kept_by_nodes: tuple[tuple[Any, str], ...] = ()
    """Objects that these have set as attributes of their ``ctx``, with their paths."""
    saved_leaves: SavedLeaves | None = None
    """What these saved of that which was lent to the body."""
    num_saved: int = 0
    donates: bool = False
    """The backward pass writes into saved tensors: it can run once with the same ones."""
    saves_apart: bool | None = None
    """Whether all of ``saved`` lie apart from what the user gets in each replay, once that was looked at."""
    is_kept_apart: bool = False
    """The recording's outputs know that nobody but replays gets what the nodes of calls keep."""
    raised: int = 0
    """``id`` of what autograd raised in the last pass that ended so, for who asks whose error that is."""
    modified: bool = False
    """A saved tensor was written afterwards by the body itself."""
    foreign: tuple[Any, ...] = ()
    """Nodes at the graph's ends that others made, as those of parameters that could not be lent."""
    foreign_ends: tuple[str, ...] = ()
    """Descriptions of the nodes in ``foreign``, for a finding."""
    paths: dict[int, str] = field(factory=dict)
    """Path of parameters and held tensors, by ``id``, where the recording follows them."""
    now_parameters: Sequence[torch.Tensor] = ()
    """The tensors that are at the places of ``parameters`` now."""
    _now_uses: list[torch.Tensor] | None = None
    """``now_parameters``, use by use, once a call asked for them."""
    now_held: Sequence[torch.Tensor] = ()
    """The tensors that are at the places of ``held`` now."""
    now_shown: list[torch.Tensor] | None = None
    """``now_held``, with a ``detach`` of those that were saved as views; None until it is needed."""
    deposits: bool | None = None
    """Whether nobody but ``.grad`` gets the gradients of ``now_parameters``, once that was asked."""
    branch: tuple[str, ...] | None = ()
    """What the host read in the body, at the breaks of the recording; None where there are such reads and no recording:
    no other run is known to have done the same."""
    checked: tuple[bool, ...] = ()
    """Of the tensors it needs, those that autograd checks for writes."""
    again: Recomputation = field(factory=Recomputation)
    """What of it is under checkpoints, to be run again."""
    is_recorded: bool = False
    """The run that gave it was recorded. Another run's graph may be another one of the same form."""
    before_eager: Callable[[], None] | None = None
    """Of a recorded body: what comes before the graph runs outside of recordings, as its nodes do so on the stream that
    recordings are made on."""

    shapes: tuple[torch.Size, ...] = ()
    """Those of ``parameters`` in the run."""

    def is_reshaped(self) -> bool:
        """Whether a parameter has another shape by now, as ``.data =`` gives it one. Autograd keeps one node for a leaf
        as long as a graph ends there, and takes no gradient of another shape than the leaf had when that was made: with
        this graph, no backward pass that comes to the parameter works any more."""
        return any(one.shape != shape for one, shape in zip(self.parameters, self.shapes, strict=False))

    def give_up_graph(self) -> None:
        """Keep no node of the graph. Nothing is differentiated by it any more."""
        self.outputs = self.inputs = self.inner_results = self.groups = self.parts = self.foreign = ()
        self.branch = self.saved_leaves = None

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """Programs of the same form take the same tensors in the same order. Asked for once the body has run."""
        return (self.num_saved, self.given, len(self.held), self.wanted, self.used_parameters, len(self.outputs),
                len(self.again.owners), self.branch, self.casts)  # fmt: skip

    def follow(self, statics: dict[str, torch.Tensor]) -> None:
        """From now on a replay's Python state has these tensors, by path."""
        paths = self.paths
        self.now_parameters = [statics.get(paths.get(id(parameter), ""), parameter) for parameter in self.parameters]
        self.now_held = [statics.get(paths.get(id(one), ""), one) for one in self.held]
        self.now_shown = self.deposits = self._now_uses = None

    @functools.cached_property
    def has_casts(self) -> bool:
        """Whether some of ``casts`` are shared. Asked for once the body has run."""
        return any(self.casts)

    def now_uses(self) -> Sequence[torch.Tensor]:
        """The tensors of ``now_parameters``, use by use."""
        if self._now_uses is None:
            self._now_uses = [self.now_parameters[number] for number in self.used_parameters]
        return self._now_uses

    def needed(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of a call that its backward pass needs besides ``saved``."""
        count = len(self.given)
        if self.now_shown is None:  # while these tensors are the right ones, so are their aliases
            self.now_shown = list(self.now_held)
            for position in self.views:
                if position >= count:
                    self.now_shown[position - count] = self.now_held[position - count].detach()
        if not count:
            return self.now_shown
        gradients = [leaves[index] for index in self.given]
        for position in self.views:
            if position < count:
                gradients[position] = gradients[position].detach()
        return gradients + self.now_shown

    def parted(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors that autograd does not check for writes, and those that it does check. At least one is checked,
        as a second backward pass has to raise."""
        loose = [tensor for tensor, is_checked in zip(tensors, self.checked, strict=True) if not is_checked]
        rest = [tensor for tensor, is_checked in zip(tensors, self.checked, strict=True) if is_checked]
        return loose, rest or [_NOTHING]

    def in_order(self, parted: Sequence[Any]) -> Sequence[Any]:
        """The tensors in their order, as they were before ``parted``."""
        num_loose = len(self.checked) - sum(self.checked)
        loose, rest = iter(parted[:num_loose]), iter(parted[num_loose:])
        return [next(rest if is_checked else loose) for is_checked in self.checked]

    def _made_again(self, tensors: Sequence[Any]) -> Mapping[Any, torch.Tensor]:
        """What blocks under checkpoints save as they run again."""
        if not self.again.blocks:
            return _NONE
        build = functools.partial(self.hooks.built, tensors=tensors)
        return self.again.run(build, tensors[len(self.checked) :])

    def gradients(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Gradients of the inputs, use by use, None where nothing reaches one."""
        return self._differentiate(tensors, self.outputs, (), grads, self._made_again(tensors))

    def summed(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of ``parameters``, summed over their uses."""
        found: list[torch.Tensor | None] = [None] * len(self.parameters)
        for number, grad in zip(self.used_parameters, grads, strict=True):
            found[number] = _plus(found[number], grad)
        return found

    @functools.cached_property
    def repeats_input(self) -> bool:
        """Whether one argument alone needs gradients, for several uses. Asked for once the body has run."""
        return len(self.wanted) > 1 and len(set(self.wanted)) == 1

    def in_one(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of such an argument, use by use: the sum, made in autograd's order, and nothing for the others."""
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            return list(grads)
        return [functools.reduce(_plus, grads), *[None] * (len(grads) - 1)]

    def gradients_of_order(
        self, tensors: Sequence[torch.Tensor], orders: Sequence[Grads], *, keeps_graph: bool, reaches_inputs: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """As ``higher_order.Body``. Each order is that of the one before, which has a graph for that."""
        ends: Sequence[Any] = self.outputs
        places: list[Any] = []
        again = self._made_again(tensors)
        with torch.enable_grad():
            for number, grads in enumerate(orders, 1):
                is_last = number == len(orders)
                come = grads if is_last and not keeps_graph else [_apart(grad) for grad in grads]
                ends = self._differentiate(
                    tensors, ends, places, come, again,
                    keeps_graph=keeps_graph or not is_last, reaches_inputs=reaches_inputs or not is_last,
                )  # fmt: skip
                places += [place for place in come if place is not None]
        return tuple([end if end is None else end.detach() for end in ends] if keeps_graph else ends)

    def gradients_of_both(
        self, tensors: Sequence[torch.Tensor], grads: Grads, higher: Sequence[tuple[Grads, Grads]]
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs in one pass: of the results, and of their gradients. ``higher``: what came in for
        the first and for the second order, the latest first."""
        ends, come = list[Any](self.outputs), list(grads)
        again = self._made_again(tensors)
        with torch.enable_grad():
            for first, second in reversed(higher):
                first = [_apart(gradient) for gradient in first]
                ends += self._differentiate(tensors, self.outputs, (), first, again, keeps_graph=True)
                come += second[: len(self.uses)]
        return self._differentiate(tensors, ends, (), come, again)

    def check(self) -> None:
        """Raises what eager raises where the body itself wrote what its gradients are computed from."""
        if self.modified:
            raise RuntimeError(f"{_WRITTEN} in the captured function that made it")

    def _differentiate(
        self, tensors: Sequence[torch.Tensor], ends: Sequence[Any], places: Sequence[Any],
        grads: Sequence[torch.Tensor | None], again: Mapping[Any, torch.Tensor], *, keeps_graph: bool = False,
        reaches_inputs: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Gradients of the inputs, use by use, and at ``places``, of ``ends``, which are the graph's or hang on it."""
        self.check()
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None and _has_graph(end)]
        inputs = self.inputs if reaches_inputs else ()
        reached = [*inputs, *[place for place in places if _has_graph(place)]]
        if not pairs or not reached:
            return (None,) * (len(self.uses) + len(places))
        if self.before_eager is not None and not is_capturing():
            self.before_eager()
        edges, defined = zip(*pairs, strict=True)
        with (
            self.hooks.passes(tensors, again) as now,
            hooks_off(self.parameters),
            stale_streams_overridden() if self.foreign and is_capturing_now() else nullcontext(),
            donation_allowed() if self.donates else nullcontext(),
            self._lending(keeps_graph=keeps_graph),
            self._raising(),
        ):
            gradients = torch.autograd.grad(
                edges, reached, defined, retain_graph=True, create_graph=keeps_graph, allow_unused=True
            )
        row = iter(gradients)
        of_inputs = list(itertools.islice(row, len(inputs))) if reaches_inputs else [None] * len(self.inputs)
        at_places = [next(row) if _has_graph(place) else None for place in places]
        return (*self._by_use(of_inputs, now.more), *at_places)

    def _lending(self, *, keeps_graph: bool) -> contextlib.AbstractContextManager[None]:
        leaves = self.saved_leaves
        return nullcontext() if leaves is None else leaves.lent(self.now_parameters, keeps_graph=keeps_graph)

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        """What is raised in the block is autograd's. It may be that nodes of leaves are on a stream that cannot be
        captured: those are named."""
        try:
            yield
        except Exception as error:
            self.raised = id(error)
            if isinstance(error, RuntimeError) and self.foreign_ends and is_capturing_now():
                error.add_note(ENDS_ELSEWHERE.format(", ".join(self.foreign_ends[:_MOST_NAMED])))
            raise

    def _by_use(
        self, grads: Sequence[torch.Tensor | None], more: dict[int, list[torch.Tensor]]
    ) -> Sequence[torch.Tensor | None]:
        """``grads``: of the inputs, the first that came to each. ``more``: those that came later."""
        if len(self.uses) == len(self.inputs):
            return grads
        rows = [iter((grad, *more.get(number, ()))) for number, grad in enumerate(grads)]
        return [next(rows[number], None) for number in self.uses]


Grads = Sequence[torch.Tensor | None]


def _apart(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor without its graph; it requires gradients if it had a graph."""
    return tensor if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


def _has_streams(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor, or one that holds others, such as a ``DTensor``: its node is a leaf's like any
    other."""
    return (type(tensor) in TENSOR_TYPES or is_wrapper(type(tensor))) and leaf_swap.is_needed(tensor.device)


def _has_graph(end: torch.Tensor | GradientEdge | None) -> bool:
    return isinstance(end, GradientEdge) or (end is not None and end.requires_grad)


class GraphSaver:
    """Runs a body and makes its program. ``before``: what the body can reach; ``lends``: it uses tensors of Python
    state that need gradients; ``beside_others``: other threads may use them, too."""

    def __init__(
        self, call: Call, values: tuple[Any, ...], before: Snapshot, wanted: Sequence[int], *, lends: bool = True,
        beside_others: bool = False, shares_casts: bool = False,
        original: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None
    ) -> None:  # fmt: skip
        self._call, self._before, self._lends, self._original = call, before, lends, original
        self._beside_others = beside_others
        self._leaves = [leaf for _, leaf in call.paths(values)]
        self._aliases: dict[int, torch.Tensor] = {}
        self._lent: Lent = {}
        self._refused: set[int] = set()
        """Tensors that could not be lent, by ``id``."""
        for position in wanted:
            leaf = self._leaves[position]
            same = next((p for p in self._aliases if self._leaves[p] is leaf), None)
            self._aliases[position] = self._aliases[same] if same is not None else leaf.detach().requires_grad_()
        self.program = SavedGraph()
        self.obstacle = ""
        """Why the body cannot be recorded apart from its backward pass, as far as the run showed."""
        self._pair: ForwardOutputs | None = None
        """The outputs, once the program is complete. What the run saved is released only after that."""
        self._empty: dict[Any, torch.Tensor] = {}
        self._left: list[Change] | None = None
        """What the body left in Python state that is part of a graph, once that was looked for."""
        self._in_autocast = shared_casts.is_in_a_block()
        self._shares_casts = shares_casts
        self._cast: dict[tuple[Any, int], torch.Tensor] = {}
        """Leaves that autocast cast, in a block around the call, by the cast's place in the graph."""
        self._casts: dict[tuple[Any, int], torch.Tensor] = {}
        """As ``_cast``, if the graph ends at the casts because other calls of the block use them."""
        self._hooks: list[tuple[Any, Callable[..., Any]]] = []
        """Nodes, and the hooks that they get."""
        self._of_users: list[Any] = []
        """Nodes of functions of users, without torch's own, as those of compiled code: these differentiate nothing."""

    def run(self, values: tuple[Any, ...], empty: dict[Any, torch.Tensor]) -> ForwardOutputs:
        """``empty``: by dtype and device, what aliases become afterwards, so that the graph keeps no memory alive."""
        arguments, self._empty = self._call.substitute(self._aliases, values), empty
        if (run := body_run.current()) is not None:
            run.will_make(self._after_fault)
        hooks = self.program.hooks
        blocks = hooks.blocks = Blocks(self._before, self._leaves, hooks.save)
        with (  # gradients are on, or this were no region; a body that turns them off and raises leaves them off
            saved_tensors_hooks(hooks.pack, hooks.unpack),
            without_recomputing(blocks.begin, blocks.end),
            self._lending() as self._lent,
        ):
            result = self._run(arguments, values)
        with torch.enable_grad():
            attached = self._attached(result)
            detached = {id(leaf): leaf.detach() for leaf in attached}
            for change in self._left or ():  # an effect of the recording, and an output whose graph is the caller's
                change.source.put(detached[id(change.after)])
            ends = [_with_metadata(leaf) for leaf in attached]
        hooks.blocks, self.program.again, self.obstacle = None, blocks.finish(), blocks.obstacle
        with torch.no_grad():
            hooks.mark_seeds(attached)
            self._note_edges(ends)
            self.program.inner_results = tuple([(at, _edge_of(attached[at])) for at in inner_results.found(attached)])
            saved = self._find_saved(attached, list(detached.values()))
            self.program.saved_leaves = self._saved_by_users()
            if len(attached) > 1:
                self.program.reaching = unreached.reaching(attached, self.program.inputs)
            if self._may_be_apart(attached):
                self.program.groups = self._groups(attached)
                if not (self.program.inner_results or self.program.repeats_input):
                    self.program.parts = parts_of(attached, self.program.inputs, self.program.uses)
        pair = ForwardOutputs(_replaced(result, detached), tuple(detached.values()), tuple(saved))
        pair.program = self.program
        self._pair = pair
        self._let_go()
        return pair

    def _run(self, arguments: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        """Run the body with these arguments. Containers among them stand for the caller's, as they hold aliases."""
        if arguments is values or not self._aliases:
            return self._call.run_plainly(arguments)
        given, own = self._call.named_values(arguments), self._call.named_values(values)
        theirs = {id(alias): self._leaves[position] for position, alias in self._aliases.items()}
        with no_gradient_reads():
            stand_ins = StandIns(given, own, theirs)
        try:
            return stand_ins.without(self._call.run_plainly(arguments))
        finally:
            with no_gradient_reads():
                stand_ins.settle()

    def _let_go(self) -> None:
        """The graph is one of a program from here on, and keeps no memory. May be called again."""
        while self._hooks:
            add_hook(*self._hooks.pop())
        self.program.hooks.end_run()
        aliases = (*self._aliases.values(), *(alias for alias, _ in self._lent.values()))
        for _, inner in pytree.leaves(aliases):  # of one that holds others those
            if (inner.dtype, inner.device) in self._empty:
                inner.data = self._empty[inner.dtype, inner.device]

    def _after_fault(self, result: Any, leaves: Sequence[Any]) -> Any:
        """The result of a call on these leaves, where something went wrong in this library once the body had run: by
        the program where that is whole, else by the graph as it ran."""
        if self._pair is not None:
            self._let_go()
            return self._pair
        hooks = self.program.hooks
        hooks.blocks, hooks.is_marking = None, False
        attached = self._attached(result)
        if not attached:
            return result
        with torch.enable_grad():
            ends = [_with_metadata(leaf) for leaf in attached]
        wanted, others = self._ends(ends)
        inputs = [*[leaves[position] for position, _ in wanted], *self._receivers(others)]
        edges = [*[edge for _, edge in wanted], *[edge for _, _, edge in others]]
        lending: Callable[[], contextlib.AbstractContextManager[None]] = nullcontext
        if self._lent and any(function_of(node) is not None for node in nodes_above(ends)):
            lent = {number: lent for number, (tensor, lent, _) in enumerate(others) if lent is not tensor}
            parameters = [tensor for tensor, _, _ in others]
            lending = functools.partial(SavedLeaves(lent).lent, parameters, keeps_graph=True)
        made = live_graph.joined(
            [leaf.detach() for leaf in attached], [_edge_of(leaf) for leaf in ends], edges, inputs, hooks.check, lending
        )
        joined = {id(leaf): tensor for leaf, tensor in zip(attached, made, strict=True)}
        for change in self._left or ():
            change.source.put(joined[id(change.after)])
        return _replaced(result, joined)

    def _attached(self, result: Any) -> list[torch.Tensor]:
        """The tensors in a body's result, and in what it left, that are part of a graph, each once."""
        if self._left is None:
            with no_gradient_reads():
                self._left = [change for change in changes(self._before) if carries_graph(change)]
        tensors = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
        tensors += [one.after for one in self._left]
        return list({id(leaf): leaf for leaf in tensors if leaf.requires_grad and leaf.grad_fn is not None}.values())

    def _lending(self) -> contextlib.AbstractContextManager[Lent]:
        tensors = self._to_lend() if self._lends else ()
        return lent_in_this_thread(tensors) if self._beside_others else lent(tensors, self._refused)

    def _to_lend(self) -> Iterator[torch.Tensor]:
        """What needs gradients in Python state and is no argument: the program's graph is to end at the run's own. It
        keeps the nodes at its ends, and autograd runs those on the stream that was current when they were made. Where
        there are no streams it ends at the parameters themselves."""
        lent = {id(leaf) for leaf in self._leaves}
        plain = [tensor for owners in self._before.tensors.values() for _, tensor in owners]
        for tensor in (*plain, *[value for _, value in self._before.entered if is_wrapper(type(value))]):
            if id(tensor) not in lent and tensor.requires_grad and _has_streams(tensor):
                lent.add(id(tensor))
                if not refuses(tensor):
                    yield tensor

    def _ends(
        self, attached: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[int, GradientEdge]], list[tuple[torch.Tensor, torch.Tensor, GradientEdge]]]:
        """Where the graph ends: positions of arguments; tensors in Python state, each with what was lent for it."""
        owned = [tensor for owners in self._before.tensors.values() for _, tensor in owners]
        edges = {
            (tensor.grad_fn, tensor.output_nr): tensor
            for tensor in owned
            if not refuses(tensor) and tensor.grad_fn is not None
        }
        aliases = {id(alias): position for position, alias in reversed(self._aliases.items())}
        casts = shared_casts.found_above(attached) if self._in_autocast else {}
        self._cast = {place: leaf for place, leaf in casts.items() if id(leaf) not in aliases}
        own = [self._lent.get(id(leaf), (leaf, leaf))[1] for leaf in self._cast.values()]
        self._shares_casts |= shared_casts.are_known(own, autocast.kept_around())
        self._casts = self._cast if self._shares_casts else {}
        ends = ends_of([leaf.grad_fn for leaf in attached], edges | self._casts)
        wanted = sorted(
            ((aliases[id(tensor)], edge) for tensor, edge in ends if id(tensor) in aliases), key=lambda pair: pair[0]
        )
        rest = [(tensor, edge) for tensor, edge in ends if id(tensor) not in aliases]
        return wanted, [(self._lent.get(id(tensor), (tensor, tensor))[1], tensor, edge) for tensor, edge in rest]

    def _cast_to(self, edge: GradientEdge) -> torch.dtype | None:
        """The dtype to which autocast casts this end of the graph, where calls of the block share the cast; else
        None."""
        leaf = self._casts.get((edge.node, edge.output_nr))
        return None if leaf is None else autocast.low_precision(leaf.device.type)

    def _receivers(self, others: Sequence[tuple[torch.Tensor, torch.Tensor, GradientEdge]]) -> Sequence[torch.Tensor]:
        casts = [self._cast_to(edge) for _, _, edge in others]
        tensors = [tensor for tensor, _, _ in others]
        return shared_casts.shared(tensors, casts) if any(casts) else tensors

    def _note_edges(self, attached: Sequence[torch.Tensor]) -> None:
        program, (wanted, others) = self.program, self._ends(attached)
        program.outputs = tuple(map(_edge_of, attached))
        program.parameters = tuple(tensor for tensor, _, _ in others)
        program.shapes = tuple(tensor.shape for tensor in program.parameters)
        _keep(program)
        program.casts = tuple(self._cast_to(edge) for _, _, edge in others) if self._casts else ()
        if self._cast and not self._casts:
            kinds = {id(leaf): autocast.low_precision(leaf.device.type) for leaf in self._cast.values()}
            program.casts_alone = tuple(kinds.get(id(tensor)) for _, tensor, _ in others)
        program.inputs = (*[edge for _, edge in wanted], *[edge for _, _, edge in others])
        program.uses = self._note_uses(attached)
        program.wanted = tuple(wanted[number][0] for number in program.uses if number < len(wanted))
        program.used_parameters = tuple(number - len(wanted) for number in program.uses if number >= len(wanted))
        foreign = [
            (lent, edge.node) for _, lent, edge in others if id(lent) not in self._lent and self._cast_to(edge) is None
        ]
        program.foreign = tuple(node for _, node in foreign)
        program.foreign_ends = tuple(self._told(tensor) for tensor, _ in foreign)
        nodes = list(nodes_above(attached))
        program.donates = any(map(writes_saved_tensors, nodes))
        of_users = [(node, function) for node in nodes if (function := function_of(node)) is not None]
        program.functions = tuple(dict.fromkeys(function for _, function in of_users))
        self._of_users = [node for node, function in of_users if package_of(function.__module__) != "torch"]
        program.kept_by_nodes = tuple(
            (value, f"{function.__qualname__}'s ctx.{name}")
            for node, function in of_users
            for name, value in getattr(node, "__dict__", {}).items()
            if type(value) not in PLAIN_TYPES and not isinstance(value, torch.Tensor)
        )

    def _told(self, tensor: torch.Tensor) -> str:
        """Which end of the graph was not lent to the body, and why."""
        sources = [source for owners in self._before.tensors.values() for source, one in owners if one is tensor]
        sources += [source for source, one in self._before.entered if one is tensor]
        if not sources:
            return "a tensor that was found nowhere in Python state"
        why = "" if id(tensor) not in self._refused else ", to which C++ code has a weak reference"
        return f"{sources[0].path}{why}"

    def _note_uses(self, attached: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The inputs, each as often as nodes use it. What uses one that others use, too, gets a hook."""
        program, uses, nodes = self.program, Counter[int](), list[tuple[Any, dict[int, int]]]()
        numbers = {(edge.node, edge.output_nr): number for number, edge in enumerate(program.inputs)}
        for node in nodes_above(attached, {edge.node for edge in program.inputs}):
            positions = {at: numbers[above] for at, above in enumerate(node.next_functions) if above in numbers}
            uses.update(positions.values())
            nodes.append((node, positions))
        for node, positions in nodes:
            several = {at: number for at, number in positions.items() if uses[number] > 1}
            if several:
                self._hooks.append((node, SeveralUses(program.hooks.passes, several)))
        return tuple(number for number in range(len(program.inputs)) for _ in range(uses[number] or 1))

    def _may_be_apart(self, attached: Sequence[torch.Tensor]) -> bool:
        """Whether results may be differentiated one after another, as far as the body goes."""
        if len(attached) == 1 or self.program.again.blocks or self.program.donates:
            return False
        with unseen():
            return can_keep()

    def _groups(self, attached: Sequence[torch.Tensor]) -> tuple[Group, ...]:
        program = self.program
        with unseen():
            return groups_of(attached, [edge.node for edge in program.inputs], program.hooks.saved_by)

    def _needed_again(self, ends: Sequence[torch.Tensor]) -> Iterator[SavedTensor]:
        """What nodes saved that the results lead to. The graph of what the body detached is kept, too, by who recorded
        the run: a later write to what that has saved is no error."""
        hooks, needed = self.program.hooks, set[int]()
        saved = [one for one in hooks.saved_tensors() if not one.is_made_again]
        if self.program.again.blocks:  # to look at their nodes runs those blocks again
            return iter(saved)
        try:
            with unseen():
                for node in nodes_above(ends) if saved else ():
                    needed.update(map(id, hooks.saved_with(node)))
        except LookupError:
            needed.update(map(id, saved))
        return (one for one in saved if id(one) in needed)

    def _find_saved(self, ends: Sequence[torch.Tensor], attached: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where each saved tensor is found; gives those that the body made."""
        arguments: dict[int, int] = {}
        for position, leaf in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                arguments.setdefault(id(leaf.untyped_storage()), position)
        saved_arguments: dict[int, list[tuple[SavedTensor, torch.Tensor]]] = {}
        held: dict[int, tuple[torch.Tensor, list[tuple[SavedTensor, torch.Tensor]]]] = {}
        fresh: dict[int, list[tuple[SavedTensor, torch.Tensor]]] = {}
        for saved_tensor in self._needed_again(ends):
            tensor = saved_tensor.tensor
            assert tensor is not None
            is_written = saved_tensor.is_checked and tensor._version != saved_tensor.version
            self.program.modified = self.program.modified or is_written
            if tensor.layout is not torch.strided:
                saved_tensor.stays, self.program.branch = True, None
                self.obstacle = self.obstacle or "a tensor that is not strided, which its backward pass needs"
                continue
            original = self._original(tensor)
            tensor = tensor if original is None else original
            storage = tensor.untyped_storage()
            owners = [owner for _, owner in self._before.owners(storage)]
            if id(storage) in arguments:
                saved_arguments.setdefault(arguments[id(storage)], []).append((saved_tensor, tensor))
            elif owners:
                owner = next((owner_of_storage for owner_of_storage in owners if owner_of_storage is tensor), owners[0])
                held.setdefault(id(owner), (owner, []))[1].append((saved_tensor, tensor))
            else:
                fresh.setdefault(id(storage), []).append((saved_tensor, tensor))
        saved: list[torch.Tensor] = []
        for members in fresh.values():
            _add_saved(members, attached, saved)
        program, count = self.program, len(saved)
        program.num_saved, program.given = count, tuple(saved_arguments)
        program.held = tuple(owner for owner, _ in held.values())
        bases = [(self._leaves[position], members) for position, members in saved_arguments.items()] + list(
            held.values()
        )
        for index, (base, members) in enumerate(bases, count):
            _note_aliases(members, index, base)
        whole = [all(_alias_of(saved_tensor).same for saved_tensor, _ in members) for _, members in bases]
        program.views = tuple(position for position, is_whole in enumerate(whole) if not is_whole)
        checked = {
            saved_tensor.index
            for saved_tensor in self.program.hooks.saved_tensors()
            if saved_tensor.is_checked and saved_tensor.alias is not None
        }
        program.checked = tuple(index in checked for index in range(count + len(bases)))
        shown = {
            position for at, (position, is_whole) in enumerate(zip(program.given, whole, strict=False), count)
            if is_whole and at in checked
        }  # fmt: skip
        program.apart = tuple(at for at, position in enumerate(program.wanted) if position not in shown)
        program.follow({})
        return saved

    def _saved_by_users(self) -> SavedLeaves | None:
        """What was lent to the body and functions of users saved, by the number of the parameter. Such functions may
        ask for gradients of it: hooks of parameters run there."""
        program = self.program
        first = program.num_saved + len(program.given)
        lent = {id(tensor): stand_in for stand_in, tensor in self._lent.values()}
        numbers, found = {id(tensor): number for number, tensor in enumerate(program.parameters)}, dict[int, Any]()
        for node in self._of_users:
            try:
                places = program.hooks.saved_by(node)
                saved = {id(program.held[at - first]) for at in places if at >= first}.intersection(numbers)
            except LookupError:
                saved = set(numbers)
            if saved:
                add_prehook(node, begin_differentiating)
                self._hooks.append((node, end_differentiating))
            found |= {numbers[of_saved]: lent[of_saved] for of_saved in saved if of_saved in lent}
        return SavedLeaves(found) if found else None


_kept: dict[int, weakref.ref[SavedGraph]] = {}
"""All that may have nodes of leaves, by ``id``."""


def _keep(program: SavedGraph) -> None:
    number = id(program)
    _kept[number] = weakref.ref(program, lambda _: _kept.pop(number, None))


def reshaped() -> list[SavedGraph]:
    """The graphs that end at leaves which have another shape by now."""
    programs = [one() for one in [*_kept.values()]]  # as a whole: other threads add some
    return [program for program in programs if program is not None and program.is_reshaped()]


_NOTHING = torch.empty(0, device="cpu")
_MOST_NAMED = 3  # ends of a graph that a finding names
_WRITTEN = "one of the variables needed for gradient computation has been modified by an inplace operation"
ENDS_ELSEWHERE = "its graph ends at {}, whose autograd node earlier eager code made on its own stream"
_NONE: Mapping[Any, torch.Tensor] = {}


def _edge_of(leaf: torch.Tensor) -> GradientEdge:
    return GradientEdge(leaf.grad_fn, leaf.output_nr)  # type: ignore[arg-type]


def _with_metadata(leaf: torch.Tensor) -> torch.Tensor:
    """Before torch 2.12 gradients cannot be asked for at the node of a user's function, but at a view of its result."""
    users = isinstance(leaf.grad_fn, torch.autograd.function.BackwardCFunction)
    return leaf.view_as(leaf) if users else leaf


def _alias_of(saved_tensor: SavedTensor) -> Alias:
    assert saved_tensor.alias is not None
    return saved_tensor.alias


def _note_aliases(members: Sequence[tuple[SavedTensor, torch.Tensor]], index: int, base: torch.Tensor) -> None:
    for saved_tensor, tensor in members:
        shift = int(tensor.storage_offset()) * tensor.element_size() - int(base.storage_offset()) * base.element_size()
        same = Geometry.of(tensor) == Geometry.of(base)
        saved_tensor.index = index
        saved_tensor.conj, saved_tensor.neg = tensor.is_conj() and not same, tensor.is_neg() and not base.is_neg()
        saved_tensor.alias = Alias(index, same, tensor.dtype, shift, tuple(tensor.shape), tuple(tensor.stride()))


def _add_saved(
    members: Sequence[tuple[SavedTensor, torch.Tensor]], attached: Sequence[torch.Tensor], saved: list[torch.Tensor]
) -> None:
    """One tensor for all that lie on one storage, so that no two inputs of the backward pass share memory."""
    first = members[0][1]
    forms = {Geometry.of(tensor) for _, tensor in members}
    if len(forms) == 1:
        outputs = [output for output in attached if output.untyped_storage() is first.untyped_storage()]
        base = next((output for output in outputs if Geometry.of(output) in forms), None)
        if base is None:  # the memory as it is: a bit says that it is read as conjugate numbers
            base = first.detach().conj() if first.is_conj() else first.detach()
    elif len({form.dtype for form in forms}) == 1 and not any(form.conj for form in forms):
        begin = min(form.offset for form in forms)
        ends = [form.offset + sum((n - 1) * s for n, s in zip(form.shape, form.stride, strict=True)) for form in forms]
        base = first.detach().as_strided((max(ends) + 1 - begin,), (1,), begin)
    else:
        for form in forms:
            _add_saved([member for member in members if Geometry.of(member[1]) == form], attached, saved)
        return
    _note_aliases(members, len(saved), base)
    saved.append(base)


def _replaced(result: Any, detached: dict[int, torch.Tensor]) -> Any:
    return pytree.replace_leaves(result, lambda leaf: detached.get(id(leaf), leaf))
