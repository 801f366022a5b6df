"""Blocks of a body under checkpoints, to be run again in the backward pass of each call.

Eager keeps what such a block begins with, and runs it again when the backward pass comes to it: with the weights, the
attributes and the modes of that moment. So does the backward pass of a region, which is a captured function: running
the blocks again is a part of its body. So weights are inputs that are read at that time, Python state is guarded as
anywhere else, and what cannot be recorded runs eagerly.

The Python function that is run again was made by the run of the body that was recorded, as a closure over tensors of
that run. What is kept is a copy of it in which each tensor is a ``Slot``, and each object that the body found an
``Owner``: those are arguments of the backward pass. For a call both are filled in.

Draws: all blocks are run again in their order, from what the generator drew from as the first of them began. So that
they draw what they drew, nothing else may draw in between. Where one draws more, or less, than it did, as another mode
has it, the next one begins where it did, as eager sees to: a body that sets a generator is not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import field
from torch.autograd.graph import saved_tensors_hooks

from capture.core.data import define
from capture.key import pytree
from capture.key.pytree import PLAIN_TYPES, TENSOR_TYPES
from capture.state import snapshot
from capture.state.snapshot import Snapshot
from capture.state.source import Source
from capture.torch_private import checkpoints
from capture.torch_private.checkpoints import without_recomputing
from capture.torch_private.devices import is_capturing_now
from capture.torch_private.generators import advanced, can_advance, default_generators, is_same_state


class Obstacle(Exception):
    """A block cannot be run again in other calls. The text tells why, after "the body uses"."""


class Slot:
    """The place of a tensor, another one in each call."""

    __slots__ = ("requires_grad", "saved_tensor")

    def __init__(self, saved_tensor: Any, *, requires_grad: bool) -> None:
        self.saved_tensor, self.requires_grad = saved_tensor, requires_grad


class Owner:
    """The place of an object that existed before the body ran, by number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@define(eq=False)
class Block:
    """One block. Its lists are in the order in which it saves tensors."""

    function: Any
    args: Sequence[Any]
    stops_early: bool
    metadata: Callable[[torch.Tensor], Any] | None
    saved: list[weakref.ref[Any]] = field(factory=list)
    """``SavedTensor``s of the graph, also those of blocks inside. Some of them may be dead."""
    metadata_saved: list[Any] = field(factory=list)
    """Metadata of each saved tensor."""
    begin_state: Any = None
    """State of the CPU's generator as the block began."""
    draws: bool = False
    runs_once: bool = False
    """What it keeps of its first run is used up by the second one."""

    def add(self, saved_tensor: Any, tensor: torch.Tensor) -> None:
        """The run of the body saves this tensor."""
        self.saved.append(weakref.ref(saved_tensor))
        self.metadata_saved.append(self._metadata_of(tensor))

    def _metadata_of(self, tensor: torch.Tensor) -> Any:
        return None if self.metadata is None else self.metadata(tensor)

    def run_again(self, fill: Callable[[Any], Any], *, to_end: bool) -> dict[Any, torch.Tensor]:
        """The tensors that it saves now, by ``SavedTensor``. ``fill``: gives the value of a slot or an owner."""
        made: list[torch.Tensor] = []
        stops = self.stops_early and not to_end

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach() if tensor.requires_grad else tensor
            made.append(tensor)
            if stops and len(made) == len(self.saved):
                raise _Enough
            return tensor

        copies: dict[int, Any] = {}
        function, *args = [copied(value, fill, copies) for value in (self.function, *self.args)]
        with (
            contextlib.suppress(_Enough),
            saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.enable_grad(),
            without_recomputing(),
        ):
            function(*args)
        self._compare(made)
        there = [(reference(), tensor) for reference, tensor in zip(self.saved, made, strict=False)]
        return {value: tensor for value, tensor in there if value is not None}

    def _compare(self, made: Sequence[torch.Tensor]) -> None:
        if len(made) < len(self.saved) or (len(made) > len(self.saved) and not self.stops_early):
            checkpoints.raise_mismatch(
                "A different number of tensors was saved during the original forward and recomputation.\n"
                f"Number of tensors saved during forward: {len(self.saved)}\n"
                f"Number of tensors saved during recomputation: {len(made)}."
            )
        for at, (saved, tensor, saved_metadata) in enumerate(zip(self.saved, made, self.metadata_saved, strict=False)):
            now = self._metadata_of(tensor)
            if saved() is not None and now != saved_metadata:
                checkpoints.raise_mismatch(
                    "Recomputed values for the following tensors have different metadata than during the forward "
                    f"pass.\ntensor at position {at}:\nsaved metadata: {saved_metadata}\nrecomputed metadata: {now}"
                )


class _Enough(Exception):
    """Raised to stop a block once it has saved everything that is needed."""


# ------------------------------------------------------------------------------------------------------------ functions
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def copied(value: Any, leaf: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    """A copy of a function, with all that is in its cells, of a container or an object. ``leaf`` gives what takes the
    place of what is no such thing, and of others ``NotImplemented``. ``copies``: made so far, with what they are of."""
    if type(value) in PLAIN_TYPES:
        return value
    if id(value) in copies:
        return copies[id(value)][1]
    copy = leaf(value)
    if copy is NotImplemented:
        copy = _opened(value, leaf, copies)
    copies[id(value)] = value, copy
    return copy


def _opened(value: Any, leaf: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    again = functools.partial(copied, leaf=leaf, copies=copies)
    kind = type(value)
    if kind is types.FunctionType:
        return _of_function(value, leaf, copies)
    if kind is types.MethodType:
        return types.MethodType(again(value.__func__), again(value.__self__))
    if kind is functools.partial:
        return functools.partial(again(value.func), *map(again, value.args), **dict(_each(again, value.keywords)))
    if checkpoints.keeps_results(value):
        return checkpoints.with_results(value, again)
    return pytree.close(value, [again(member) for _, member in pytree.children(value)])


def _each(again: Callable[[Any], Any], table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        yield name, again(value)


def _of_function(function: types.FunctionType, leaf: Callable[[Any], Any], copies: dict[int, Any]) -> Any:
    cells = tuple([copies.setdefault(id(cell), (cell, types.CellType()))[1] for cell in function.__closure__ or ()])
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    copies[id(function)] = function, made  # it may be in one of its own cells
    again = functools.partial(copied, leaf=leaf, copies=copies)
    for cell, new in zip(function.__closure__ or (), cells, strict=True):
        if id(new) not in copies:
            copies[id(new)] = new, None
            with contextlib.suppress(ValueError):  # the cell is empty
                new.cell_contents = again(cell.cell_contents)
    made.__defaults__ = None if function.__defaults__ is None else tuple(map(again, function.__defaults__))
    made.__kwdefaults__ = function.__kwdefaults__ and dict(_each(again, function.__kwdefaults__))
    made.__dict__.update(_each(again, function.__dict__))
    return made


# --------------------------------------------------------------------------------------------------- while a body runs
class Blocks:
    """Notes the blocks of a body while it runs."""

    def __init__(self, before: Snapshot, leaves: Sequence[Any], save: Callable[..., Any]) -> None:
        self._before, self._save = before, save
        """``save(tensor, is_checked=...)``: gives a ``SavedTensor``."""
        self.found: list[Block] = []
        self.current: Block | None = None
        self.owners: list[Callable[[], Any]] = []
        self.obstacle: str = ""
        self._known = {id(value): value for _, value in before.entered}
        self._storages = {id(storage) for storage in before.storages}
        self._storages |= {
            id(leaf.untyped_storage())
            for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }  # fmt: skip
        self._run: list[tuple[Any, list[tuple[Any, int]]]] = []
        """The blocks themselves, and what they reached as they began."""
        self._begin_state = _generator_states()[0]
        self._states: list[torch.Tensor] = []
        self._last_state: torch.Tensor | None = None

    def begin(self, hooks: Any) -> bool:
        """Note that a block begins. Always True: what it saves is left to the hooks that are in force already."""
        block = checkpoints.block_of(hooks)
        self._run.append((block, _reach(block.function)))
        self.current = Block(block.function, block.args, block.stops_early, block.metadata)
        self._states = _generator_states()
        return True

    def end(self) -> None:
        """A block has run."""
        block, self.current = self.current, None
        assert block is not None
        self.found.append(block)
        try:
            self._note_draws(block)
            states = checkpoints.state_of(block.function), checkpoints.device_states_of(block.function)
            memo: dict[int, Any] = {id(state): (state, None) for state in states}
            checked = functools.partial(self._stand_in, is_checked=True)  # tensors in containers are not checked
            stand_in = [checked if isinstance(value, torch.Tensor) else self._stand_in for value in block.args]
            block.args = [copied(value, leaf, memo) for value, leaf in zip(block.args, stand_in, strict=True)]
            block.function = copied(block.function, self._stand_in, memo)
            checkpoints.keep_no_state(block.function)
        except Obstacle as error:
            self.obstacle = self.obstacle or str(error)

    def finish(self) -> Recomputation:
        """The body has run. Where there is an obstacle, its blocks are this run's alone."""
        for block_run, before in self._run:
            now = _reach(block_run.function)
            if len(now) != len(before) or any(a is not b or v != w for (a, v), (b, w) in zip(now, before, strict=True)):
                self.obstacle = (
                    self.obstacle or "a checkpointed function that reaches what is written or replaced later"
                )
        recomputation = Recomputation(self.found, self.owners, self._begin_state, _generator_states()[0])
        self.obstacle = self.obstacle or recomputation.obstacle
        if self.obstacle:
            recomputation.is_of_one_run = True
            for block, (block_run, _) in zip(self.found, self._run, strict=True):
                block.function, block.args = block_run.function, block_run.args
        self._run.clear()
        return recomputation

    def _note_draws(self, block: Block) -> None:
        now = _generator_states()
        moved = [not is_same_state(state, state_now) for state, state_now in zip(self._states, now, strict=False)]
        block.draws, block.begin_state = moved[0], self._states[0]
        if any(moved[1:]):
            raise Obstacle("a checkpointed function that draws on an accelerator")
        if block.draws:
            if self._last_state is not None and not is_same_state(self._last_state, self._states[0]):
                raise Obstacle("checkpointed functions that draw, and draws between them")
            self._last_state = now[0]

    def _stand_in(self, value: Any, *, is_checked: bool = False) -> Any:
        """A slot for a tensor, an owner for what was there before the body ran."""
        kind = type(value)
        if isinstance(value, torch.Tensor) and not pytree.is_container(value):
            if kind not in TENSOR_TYPES or value.layout is not torch.strided:
                raise Obstacle(f"a checkpointed function that reaches a {kind.__qualname__} of layout {value.layout}")
            return Slot(self._save(value, is_checked=is_checked), requires_grad=value.requires_grad)
        if id(value) in self._known and (not pytree.is_container(value) or not _has_tensors(value)):
            return Owner(self._number_of(value))
        if checkpoints.keeps_results(value):
            self._look_at_results(value)
            assert self.found
            self.found[-1].runs_once = True
            return NotImplemented
        if kind in _FUNCTIONS or pytree.is_container(value):
            return NotImplemented
        self._look_into(value)
        return value

    def _number_of(self, value: Any) -> int:
        for number, owner in enumerate(self.owners):
            if owner() is value:
                return number
        try:
            self.owners.append(weakref.ref(value))
        except TypeError:
            self.owners.append(lambda: value)
        return len(self.owners) - 1

    def _look_at_results(self, context: Any) -> None:
        for operator, entries in checkpoints.kept_results(context):
            if torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()) and any(map(_has_wrapped, entries)):
                raise Obstacle("a selective checkpoint that keeps what was drawn")

    def _look_into(self, value: Any) -> None:
        """What the body made and nobody can open must not lead to tensors that it made."""
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, torch.Generator)):
            return
        found = snapshot.snapshot([Source("root", value, None, "block")])
        if any(id(storage) not in self._storages for storage in found.storages):
            raise Obstacle(f"a checkpointed function that reaches tensors of the body in a {type(value).__qualname__}")


def _has_wrapped(entry: Any) -> bool:
    return type(entry) is not object


def _has_tensors(container: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for _, leaf in pytree.leaves(container))


def _reach(function: Any) -> list[tuple[Any, int]]:
    """What a block reaches now, with the versions of tensors."""
    reached: list[tuple[Any, int]] = []

    def leaf(value: Any) -> Any:
        if type(value) in _FUNCTIONS or (pytree.is_container(value) and not checkpoints.keeps_results(value)):
            return NotImplemented
        is_plain = isinstance(value, torch.Tensor) and not value.is_inference() and not pytree.is_container(value)
        reached.append((value, value._version if is_plain else 0))
        return value

    copied(function, leaf, {})
    return reached


def _generator_states() -> list[torch.Tensor]:
    """States of the CPU's generator, then of those of accelerators, where they can be read."""
    known = default_generators()
    return [one.get_state() for one in (known[:1] if is_capturing_now() else known)]


# ----------------------------------------------------------------------------------------------------------- of a call
@define(eq=False)
class Recomputation:
    """What is run again in the backward pass of a body."""

    blocks: Sequence[Block] = ()
    owners: Sequence[Callable[[], Any]] = ()
    begin_state: Any = None
    """State of the CPU's generator as the body began, and after it."""
    end_state: Any = None
    is_of_one_run: bool = False
    """It holds tensors of the run, and serves no other call."""

    @functools.cached_property
    def follows_draws(self) -> bool:
        """Whether the body draws, so that its blocks draw from a state that follows from the one at the beginning of
        the call."""
        return bool(self.blocks) and not is_same_state(self.begin_state, self.end_state)

    @property
    def obstacle(self) -> str:
        """Why it cannot draw the same in other calls."""
        if all(can_advance(self.begin_state, block.begin_state) for block in self.blocks):
            return ""
        return "a checkpointed function after draws of an unknown number"

    @property
    def runs_once(self) -> bool:
        """Whether a second backward pass raises, even where the graph was kept."""
        return any(block.runs_once for block in self.blocks)

    def states(self, begin: torch.Tensor | None, *, is_replay: bool) -> list[tuple[torch.Generator, torch.Tensor]]:
        """What generators are to draw from as blocks run again: of a replay that just ended, and began with this where
        the body draws; or of the run that was noted."""
        generators = default_generators()
        states = [(generator, generator.get_state()) for generator in (generators if is_replay else generators[1:])]
        if not is_replay:
            return [(generators[0], self.blocks[0].begin_state), *states]
        if begin is None:
            return states
        first = advanced(begin, self.begin_state, self.blocks[0].begin_state)
        assert first is not None
        return [(generators[0], first), *states[1:]]

    def run(self, build: Callable[[Any], torch.Tensor], owners: Sequence[Any]) -> dict[Any, torch.Tensor]:
        """Run the blocks again. Gives all tensors that they save, by ``SavedTensor``. ``build``: gives the call's
        tensor for a ``SavedTensor``."""

        def fill(value: Any) -> Any:
            if type(value) is Slot:
                tensor = build(value.saved_tensor)
                return tensor.requires_grad_() if value.requires_grad else tensor
            if type(value) is Owner:
                return owners[value.number]
            is_opened = type(value) in _FUNCTIONS or checkpoints.keeps_results(value) or pytree.is_container(value)
            return NotImplemented if is_opened else value

        generator, to_end = default_generators()[0], any(block.draws for block in self.blocks)
        saved, first = dict[Any, torch.Tensor](), generator.get_state()
        for block in self.blocks:
            begin = advanced(first, self.blocks[0].begin_state, block.begin_state)
            if begin is not None and not is_same_state(begin, generator.get_state()):
                generator.set_state(begin)
            saved.update(block.run_again(fill, to_end=to_end))
        return saved


@contextlib.contextmanager
def drawing_from(states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    """In the block generators draw from there; afterwards as if nobody had drawn."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
