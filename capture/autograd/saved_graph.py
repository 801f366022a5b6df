"""Program: the autograd graph of a body, kept to compute gradients of calls that only replayed the body.

The graph holds no values. Where autograd saves a tensor, it keeps a note of where that tensor is found in each call:
made by the body (then it is handed out beside the results), part of an argument, or of a tensor in Python state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from attrs import define, field
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from capture import _containers
from capture import _torch_private_donated as donated
from capture._call import Call
from capture._containers import TENSOR_TYPES, result_leaves
from capture._gradients import ends_of, hooks_off, nodes_above, refuses
from capture._leaves import Lent, lent
from capture._outputs import Alias
from capture._seeds import may_be_seed, on_host, read_seeds
from capture._state import Snapshot
from capture._torch_private_cuda import is_capturing
from capture._torch_private_nodes import moved
from capture.backends import Geometry


class Pair(NamedTuple):
    """What a body gives whose results need gradients."""

    result: Any
    """The user's result, without a graph."""
    attached: tuple[torch.Tensor, ...]
    """Tensors in it that need gradients."""
    saved: tuple[torch.Tensor, ...]
    """Made by the body and needed by its backward pass."""


def lies_apart(pair: Pair) -> bool:
    """Nothing that the user gets shares memory with what the backward pass needs: no write of the user's could spoil
    it, which autograd would have to find."""
    tensors = [leaf for _, leaf in result_leaves(pair.result) if isinstance(leaf, torch.Tensor)]
    given = {one.untyped_storage()._cdata for one in (*tensors, *pair.attached)}
    return not any(one.untyped_storage()._cdata in given for one in pair.saved)


class Note:
    """Stands for a saved tensor in the graph: how to find it among the tensors of a call."""

    __slots__ = ("alias", "conj", "index", "is_seed", "neg", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        """The saved tensor itself, as long as the body runs."""
        self.version = tensor._version
        self.alias: Alias | None = None
        self.index = -1
        self.conj = self.neg = False
        self.is_seed = False
        """From what an attention kernel drew, which reads this on the host unless it is captured."""


class Current:
    """The tensors of the call whose gradients are computed now. The graph knows this, and nothing that knows it."""

    __slots__ = ("is_marking", "notes", "tensors")

    def __init__(self) -> None:
        self.tensors: Sequence[torch.Tensor] = ()
        self.is_marking = False
        """What is looked for are seeds."""
        self.notes: list[Note] = []
        """Of the run of the body."""

    def pack(self, tensor: torch.Tensor) -> Note:
        """What the graph keeps in place of a tensor."""
        self.notes.append(Note(tensor))
        return self.notes[-1]

    def find(self, note: Note) -> torch.Tensor:
        """The tensor that a note stands for."""
        if note.tensor is not None:
            note.is_seed = self.is_marking and may_be_seed(note.tensor)
            return note.tensor if self.is_marking else note.tensor.detach()
        assert note.alias is not None
        tensor = note.alias.build(self.tensors[note.index].detach())
        tensor = tensor.conj() if note.conj else tensor
        tensor = tensor.neg() if note.neg else tensor
        return on_host(tensor) if note.is_seed and not is_capturing() else tensor

    def mark_seeds(self, ends: Sequence[torch.Tensor]) -> None:
        """Find what was drawn from by attention kernels that were captured: such seeds lie on the device."""
        if any(may_be_seed(note.tensor) for note in self.notes):
            self.is_marking = True
            read_seeds(ends)
            self.is_marking = False


@define(eq=False)
class Program:
    """Gradients of one body. Tensors it needs, in order: ``saved``, then arguments, then tensors in Python state."""

    current: Current = field(factory=Current)
    outputs: tuple[GradientEdge, ...] = ()
    inputs: tuple[GradientEdge, ...] = ()
    """Arguments at ``wanted``, then parameters."""
    wanted: tuple[int, ...] = ()
    parameters: tuple[torch.Tensor, ...] = ()
    given: tuple[int, ...] = ()
    """Positions of arguments that the backward pass needs."""
    held: tuple[torch.Tensor, ...] = ()
    """Tensors in Python state that the backward pass needs."""
    views: tuple[int, ...] = ()
    """Which of ``given`` and ``held``, by position, were saved as views: those keep memory that ``.data =`` takes from
    the tensor."""
    num_saved: int = 0
    donates: bool = False
    """The backward pass writes into saved tensors: it can run once with the same ones."""
    saves_apart: bool | None = None
    """Whether all of ``saved`` lie apart from what the user gets in each replay, once that was looked at."""
    modified: bool = False
    """A saved tensor was written afterwards by the body itself."""
    foreign: tuple[Any, ...] = ()
    """Nodes at the graph's ends that others made, as those of parameters that could not be lent."""
    paths: dict[int, str] = field(factory=dict)
    """Path of parameters and held tensors, by ``id``, where the recording follows them."""
    now_parameters: Sequence[torch.Tensor] = ()
    """What has the places of ``parameters`` now."""
    now_held: Sequence[torch.Tensor] = ()
    """What has those of ``held``."""
    now_shown: list[torch.Tensor] | None = None
    """The same, ``detach``ed where it was saved as a view."""
    deposits: bool | None = None
    """Whether nobody but ``.grad`` gets the gradients of ``now_parameters``, once that was asked."""
    before_eager: Callable[[], None] | None = None
    """Of a recorded body: what comes before the graph runs outside of recordings, as its nodes do so on the stream that
    recordings are made on."""

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """Programs of the same form take the same tensors in the same order. Asked for once the body has run."""
        return (self.num_saved, self.given, len(self.held), self.wanted, len(self.parameters), len(self.outputs))

    def follow(self, statics: dict[str, torch.Tensor]) -> None:
        """From now on a replay's Python state has these tensors, by path."""
        paths = self.paths
        self.now_parameters = [statics.get(paths.get(id(one), ""), one) for one in self.parameters]
        self.now_held = [statics.get(paths.get(id(one), ""), one) for one in self.held]
        self.now_shown = self.deposits = None

    def needed(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of a call that its backward pass needs beside ``saved``."""
        count = len(self.given)
        if self.now_shown is None:  # as long as these tensors are the right ones, so are aliases of them
            self.now_shown = list(self.now_held)
            for position in self.views:
                if position >= count:
                    self.now_shown[position - count] = self.now_held[position - count].detach()
        if not count:
            return self.now_shown
        found = [leaves[index] for index in self.given]
        for position in self.views:
            if position < count:
                found[position] = found[position].detach()
        return found + self.now_shown

    def gradients(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Gradients of the inputs, None where nothing reaches one."""
        if self.modified:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation in the "
                "captured function that made it"
            )
        edges = [edge for edge, grad in zip(self.outputs, grads, strict=True) if grad is not None]
        defined = [grad for grad in grads if grad is not None]
        if not edges:
            return (None,) * len(self.inputs)
        if self.before_eager is not None and not is_capturing():
            self.before_eager()
        self.current.tensors = tensors
        try:
            with (
                hooks_off(self.parameters),
                self._here(defined),
                donated.allowed() if self.donates else nullcontext(),
            ):
                return torch.autograd.grad(edges, self.inputs, defined, retain_graph=True, allow_unused=True)
        finally:
            self.current.tensors = ()

    def _here(self, grads: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """A capture cannot go to the streams of nodes that others made."""
        if not (self.foreign and grads[0].is_cuda and is_capturing()):
            return nullcontext()
        return moved(self.foreign, torch.cuda.current_stream(grads[0].device))


class Saver:
    """Runs a body and makes its program. ``before``: what the body can reach."""

    def __init__(self, call: Call, values: tuple[Any, ...], before: Snapshot, wanted: Sequence[int]) -> None:
        self._call, self._before = call, before
        self._leaves = [leaf for _, leaf in call.paths(values)]
        self._aliases: dict[int, torch.Tensor] = {}
        self._lent: Lent = {}
        for position in wanted:
            leaf = self._leaves[position]
            same = next((p for p in self._aliases if self._leaves[p] is leaf), None)
            self._aliases[position] = self._aliases[same] if same is not None else leaf.detach().requires_grad_()
        self.program = Program()

    def run(self, values: tuple[Any, ...], empty: dict[Any, torch.Tensor]) -> Pair:
        """``empty``: by dtype and device, what aliases become afterwards, so that the graph keeps no memory alive."""
        given = self._call.substitute(self._aliases, values)
        with torch.enable_grad():
            current = self.program.current
            hooks = saved_tensors_hooks(current.pack, current.find)
            with hooks, lent(self._to_lend()) as self._lent:
                result = self._call.run_plainly(given)
            attached = [leaf for _, leaf in result_leaves(result) if isinstance(leaf, torch.Tensor)]
            attached = list({id(leaf): leaf for leaf in attached if leaf.requires_grad}.values())
            detached = {id(leaf): leaf.detach() for leaf in attached}
            ends = [_with_metadata(leaf) for leaf in attached]
        with torch.no_grad():
            current.mark_seeds(attached)
            self._note_edges(ends)
            saved = self._find_saved(list(detached.values()))
        for note in current.notes:
            note.tensor = None
        current.notes.clear()
        for alias in (*self._aliases.values(), *(alias for alias, _ in self._lent.values())):
            if (alias.dtype, alias.device) in empty:
                alias.data = empty[alias.dtype, alias.device]
        result = _replaced(result, detached)
        return Pair(result, tuple(detached.values()), tuple(saved))

    def _to_lend(self) -> Iterator[torch.Tensor]:
        """What needs gradients in Python state and is no argument: the program's graph is to end at the run's own. It
        keeps the nodes at its ends, and autograd runs those on the stream that was current when they were made."""
        given = {id(leaf) for leaf in self._leaves}
        for owners in self._before.tensors.values():
            for _, tensor in owners:
                if id(tensor) not in given and type(tensor) in TENSOR_TYPES and tensor.requires_grad:
                    given.add(id(tensor))
                    if not refuses(tensor):
                        yield tensor

    def _note_edges(self, attached: Sequence[torch.Tensor]) -> None:
        program = self.program
        program.outputs = tuple(GradientEdge(leaf.grad_fn, leaf.output_nr) for leaf in attached)  # type: ignore[arg-type]
        owned = [tensor for owners in self._before.tensors.values() for _, tensor in owners]
        known = {
            (tensor.grad_fn, tensor.output_nr): tensor
            for tensor in owned
            if not refuses(tensor) and tensor.grad_fn is not None
        }
        ends = ends_of([leaf.grad_fn for leaf in attached], known)
        aliases = {id(alias): position for position, alias in reversed(self._aliases.items())}
        wanted = sorted(
            ((aliases[id(tensor)], edge) for tensor, edge in ends if id(tensor) in aliases), key=lambda one: one[0]
        )
        rest = [(tensor, edge) for tensor, edge in ends if id(tensor) not in aliases]
        others = [(self._lent.get(id(tensor), (tensor, tensor))[1], edge) for tensor, edge in rest]
        program.wanted = tuple(position for position, _ in wanted)
        program.parameters = tuple(tensor for tensor, _ in others)
        program.inputs = tuple(edge for _, edge in (*wanted, *others))
        program.foreign = tuple(edge.node for tensor, edge in rest if id(tensor) not in self._lent)
        program.donates = any(map(donated.writes_saved, nodes_above(attached)))

    def _find_saved(self, attached: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where each saved tensor is found; gives those that the body made."""
        arguments: dict[int, int] = {}
        for position, leaf in enumerate(self._leaves):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                arguments.setdefault(id(leaf.untyped_storage()), position)
        given: dict[int, list[tuple[Note, torch.Tensor]]] = {}
        held: dict[int, tuple[torch.Tensor, list[tuple[Note, torch.Tensor]]]] = {}
        fresh: dict[int, list[tuple[Note, torch.Tensor]]] = {}
        for note in self.program.current.notes:
            tensor = note.tensor
            assert tensor is not None
            self.program.modified = self.program.modified or tensor._version != note.version
            storage = tensor.untyped_storage()
            owners = [owner for _, owner in self._before.owners(storage)]
            if id(storage) in arguments:
                given.setdefault(arguments[id(storage)], []).append((note, tensor))
            elif owners:
                owner = next((one for one in owners if one is tensor), owners[0])
                held.setdefault(id(owner), (owner, []))[1].append((note, tensor))
            else:
                fresh.setdefault(id(storage), []).append((note, tensor))
        saved: list[torch.Tensor] = []
        for members in fresh.values():
            _save(members, attached, saved)
        program, count = self.program, len(saved)
        program.num_saved, program.given = count, tuple(given)
        program.held = tuple(owner for owner, _ in held.values())
        bases = [(self._leaves[position], members) for position, members in given.items()] + list(held.values())
        for index, (base, members) in enumerate(bases, count):
            _point(members, index, base)
        whole = [all(_alias_of(note).same for note, _ in members) for _, members in bases]
        program.views = tuple(position for position, is_whole in enumerate(whole) if not is_whole)
        program.follow({})
        return saved


def _with_metadata(leaf: torch.Tensor) -> torch.Tensor:
    """Before torch 2.12 gradients cannot be asked for at the node of a user's function, but at a view of its result."""
    users = isinstance(leaf.grad_fn, torch.autograd.function.BackwardCFunction)
    return leaf.view_as(leaf) if users else leaf


def _alias_of(note: Note) -> Alias:
    assert note.alias is not None
    return note.alias


def _point(members: Sequence[tuple[Note, torch.Tensor]], index: int, base: torch.Tensor) -> None:
    for note, tensor in members:
        shift = int(tensor.storage_offset()) * tensor.element_size() - int(base.storage_offset()) * base.element_size()
        same = Geometry.of(tensor) == Geometry.of(base)
        note.index = index
        note.conj, note.neg = tensor.is_conj() and not same, tensor.is_neg() and not base.is_neg()
        note.alias = Alias(index, same, tensor.dtype, shift, tuple(tensor.shape), tuple(tensor.stride()))


def _save(
    members: Sequence[tuple[Note, torch.Tensor]], attached: Sequence[torch.Tensor], saved: list[torch.Tensor]
) -> None:
    """One tensor for all that lie on one storage, so that no two inputs of the backward pass share memory."""
    first = members[0][1]
    forms = {Geometry.of(tensor) for _, tensor in members}
    if len(forms) == 1:
        outputs = [one for one in attached if one.untyped_storage() is first.untyped_storage()]
        base = next((one for one in outputs if Geometry.of(one) in forms), None)
        base = first.detach() if base is None else base
    elif len({form.dtype for form in forms}) == 1 and not any(form.conj for form in forms):
        begin = min(form.offset for form in forms)
        ends = [form.offset + sum((n - 1) * s for n, s in zip(form.shape, form.stride, strict=True)) for form in forms]
        base = first.detach().as_strided((max(ends) + 1 - begin,), (1,), begin)
    else:
        for form in forms:
            _save([one for one in members if Geometry.of(one[1]) == form], attached, saved)
        return
    _point(members, len(saved), base)
    saved.append(base)


def _replaced(result: Any, detached: dict[int, torch.Tensor]) -> Any:
    return _containers.replace_leaves(result, lambda leaf: detached.get(id(leaf), leaf))
