"""Tape: the operators of one run as straight-line code that runs again into the recorded memory.

Each operator is written down in the fastest form that was proven, on the recorded inputs, to give the same bits
as the operator did: a Python binding with ``out=``, else the operator followed by a copy. Views are not replayed;
a register is a tensor over fixed memory, so that its views are fixed too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, Literal

import torch
from attrs import define, evolve, field, frozen

from capture import _torch_private, _torch_private_operators
from capture._call import Call
from capture._operators import Traits
from capture._tensors import same_bits
from capture.backends import Block, Followed, Geometry, Move, Refusal
from capture.backends.arena import Arena
from capture.backends.staging import over

_LITERALS = (int, bool, type(None))


@define(eq=False)
class Root:
    """Memory that registers look at: a block of the arena, a static tensor of the caller, or a constant."""

    kind: Literal["block", "static", "constant"]
    number: int
    storage: torch.UntypedStorage | None = None
    path: str = ""
    owner: torch.Tensor | None = None
    offset: int = 0
    """Storage offset of the owner when it was bound; the owner itself may have been given other memory since."""
    is_argument: bool = False
    kept: bool = False
    """An output or effect lies here, so results must be written to this very memory."""
    registers: dict[Geometry, str] = field(factory=dict)


@frozen
class Ref:
    """A register in a step's arguments."""

    name: str


@define(eq=False)
class Step:
    """One operator. ``form``: ``call`` writes by itself, ``out`` takes ``out=``, ``copy`` returns fresh tensors."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Literal["call", "out", "copy"]
    outs: list[tuple[Root, str] | None] = field(factory=list)
    """Per result of the operator: where it goes; None for a result that is no fresh tensor."""
    single: bool = True
    """The operator returns one tensor, not a sequence."""


class Tape:
    """Written by a recorder, then ``compile`` d once."""

    rebinds_tensors = True

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._roots: list[Root] = []
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], Root]] = {}
        self._steps: list[Step] = []
        self.scope: dict[str, Any] = {}
        self.num_ops = self.copied_inside = 0
        self.graph_bytes = 0
        self.copied_paths: frozenset[str] = frozenset()
        self.source = ""
        self.replay: Callable[[Sequence[Any]], None] = _released

    def add_block(self, block: Block, visible: torch.UntypedStorage) -> Root:
        """A root over a block; ``visible`` is the storage that the body sees there."""
        root = Root("block", len(self._roots), storage=self._arena.storage(block))
        return self._add(root, visible)

    def add_static(self, path: str, owner: torch.Tensor, seen: torch.UntypedStorage | None = None) -> Root:
        """A root over memory of the caller; of an argument, which the body sees through the storage ``seen``."""
        root = Root("static", len(self._roots), path=path, owner=owner, offset=int(owner.storage_offset()))
        root.is_argument = seen is not None
        return self._add(root, owner.untyped_storage() if seen is None else seen)

    def own(self, path: str, owner: torch.Tensor) -> None:
        """Name the owner by which a static root is bound anew when its tensor moves."""
        root = self.root_of(owner)
        if root is not None and root.kind == "static":
            root.path, root.owner, root.offset = path, owner, int(owner.storage_offset())

    def add_constant(self, tensor: torch.Tensor) -> Root:
        """A root over a private copy of a constant's memory."""
        root = Root("constant", len(self._roots), storage=tensor.untyped_storage().clone())
        return self._add(root, tensor.untyped_storage())

    def _add(self, root: Root, visible: torch.UntypedStorage) -> Root:
        self._roots.append(root)
        self._by_storage[id(visible)] = (weakref.ref(visible), root)
        return root

    def root_of(self, tensor: torch.Tensor) -> Root | None:
        """The root a tensor of the body lies on."""
        storage = tensor.untyped_storage()
        found = self._by_storage.get(id(storage))
        return found[1] if found is not None and found[0]() is storage else None

    def register(self, tensor: torch.Tensor) -> str | None:
        """Name of the register that looks at the same memory as this tensor; None for unknown memory."""
        root = self.root_of(tensor)
        if root is None or tensor.is_neg():
            return None
        geometry = Geometry.of(tensor)
        name = root.registers.get(geometry)
        if name is None:
            name = root.registers[geometry] = f"r{root.number}_{len(root.registers)}"
            self.scope[name] = _look(root, geometry)
        return name

    def value(self, template: Any) -> Any:
        """Replace registers in a template by their tensors."""
        if isinstance(template, Ref):
            return self.scope[template.name]
        if isinstance(template, (list, tuple)):
            return type(template)([self.value(member) for member in template])
        return template

    def append(self, step: Step) -> None:
        """Write a step down."""
        self._steps.append(step)
        self.num_ops += 1

    def prove_out(self, function: Callable[..., Any], step: Step, results: list[torch.Tensor]) -> bool:
        """Run ``function`` with ``out=`` into the step's registers; True if it gave the bits of ``results``."""
        outs = [self.scope[out[1]] for out in step.outs if out is not None]
        for out in outs:
            _fill(out)
        try:
            with warnings.catch_warnings(record=True) as objections, torch.no_grad():
                warnings.simplefilter("always")  # as errors, torch would print those of a call that fails
                places = [(out.data_ptr(), out.shape, out.stride()) for out in outs]
                args, kwargs = self.value(step.args), {key: self.value(v) for key, v in step.kwargs.items()}
                function(*args, **kwargs, out=outs[0] if len(outs) == 1 else tuple(outs))
        except Exception:  # noqa: BLE001 - any objection means that this form is not used
            return False
        kept = not objections and places == [(out.data_ptr(), out.shape, out.stride()) for out in outs]
        return kept and all(same_bits(out, result) for out, result in zip(outs, results, strict=True))

    def prove(self, function: Callable[..., Any], step: Step, results: list[torch.Tensor]) -> bool:
        """Run ``function`` like the operator; True if it gave the bits of ``results`` in as many tensors."""
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")
                args, kwargs = self.value(step.args), {key: self.value(v) for key, v in step.kwargs.items()}
                found = function(*args, **kwargs)
        except Exception:  # noqa: BLE001 - any objection means that this form is not used
            return False
        if step.single is not isinstance(found, torch.Tensor):
            return False
        found = [found] if step.single else list(found)
        same = len(found) == len(results) and all(isinstance(one, torch.Tensor) for one in found)
        return same and all(
            one.stride() == result.stride() and same_bits(one, result)
            for one, result in zip(found, results, strict=True)
        )

    def compile(self, copies_in: list[str], copies_out: list[str]) -> None:
        """Generate the replay function. The lines given run before and after the operators.

        Registers are made anew, since those made under a dispatch mode do not share their owner's version counter, and
        those made inside ``inference_mode`` could not be written outside of it.
        """
        for root in self._roots:
            for geometry, name in root.registers.items():
                self.scope[name] = _look(root, geometry)
        used = self._used()
        lines = [*copies_in, *[self._line(index, step, used) for index, step in enumerate(self._steps)], *copies_out]
        lines = lines or ["pass"]
        if torch.is_grad_enabled():  # the body needed no gradient, yet operators with out= would refuse parameters
            self.scope["grad"] = _torch_private.set_grad_enabled
            lines = ["grad(False)", "try:", *[f"    {line}" for line in lines], "finally: grad(True)"]
        self.source = "def replay(t):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(self.source, "<capture tape>", "exec"), self.scope)  # noqa: S102 - text made above
        self.replay = self.scope["replay"]

    def rebind(self, moves: Sequence[Move]) -> bool:
        """Look at other tensors of the same metadata under the same paths."""
        tensors = {move.path: move.tensor for move in moves}
        for root in self._roots:
            if root.kind == "static" and root.path in tensors and root.owner is not None:
                self._look_at(root, tensors[root.path])
        return True

    def _look_at(self, root: Root, tensor: torch.Tensor, *, once: bool = False) -> None:
        """Another tensor of the same metadata is the owner from now on, or in this call alone."""
        shift = int(tensor.storage_offset()) - root.offset
        root.owner, root.offset = tensor, int(tensor.storage_offset())
        registers: dict[Geometry, str] = {}
        for old, name in root.registers.items():
            geometry = evolve(old, offset=old.offset + shift)
            registers[geometry] = name
            self.scope[name] = _look(root, geometry, is_current=once)
        root.registers = registers

    def follow(self, inputs: Sequence[Followed]) -> frozenset[str]:
        """All. A tape keeps no hold of them between calls."""
        roots = {root.path: root for root in self._roots if root.is_argument}
        taken = [(one, roots[one.path]) for one in inputs if one.path in roots]
        plain = self.replay

        def bound(leaves: Sequence[Any]) -> None:
            beside: list[tuple[torch.Tensor, torch.Tensor]] = []
            try:
                for one, root in taken:
                    tensor = leaf = leaves[one.position]
                    if self._arena.find(leaf.data_ptr()):
                        with torch.no_grad():
                            tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).copy_(leaf)
                        beside += [(leaf, tensor)] if one.is_written else []
                    self._look_at(root, tensor, once=True)
                plain(leaves)
                with torch.no_grad():
                    for leaf, tensor in beside:
                        leaf.copy_(tensor)
            finally:
                for _, root in taken:
                    root.owner = None
                    self.scope.update(dict.fromkeys(root.registers.values()))

        self.replay = bound
        return frozenset(one.path for one, _ in taken)

    def learn(
        self, call: Call, moves: Sequence[Move], others: Sequence[Move], generators: Sequence[torch.Generator]
    ) -> Refusal | None:
        """Nothing to find out: the tape looks at tensors, not at addresses."""
        del call, moves, others, generators
        return None

    def users(self, paths: Sequence[str]) -> list[str]:
        """Operators need no names here: no rebind of a tape is refused."""
        del paths
        return []

    def release(self) -> None:
        """Drop all references to memory."""
        self.replay = _released
        self.scope.clear()
        self._roots.clear()
        self._steps.clear()
        self._by_storage.clear()

    def _line(self, index: int, step: Step, used: Set[str]) -> str:
        function = f"f{index}"
        self.scope[function] = step.function
        arguments = [self._text(index, position, value) for position, value in enumerate(step.args)]
        arguments += [f"{key}={self._text(index, key, value)}" for key, value in step.kwargs.items()]
        if step.form == "out":
            names = [out[1] for out in step.outs if out is not None]
            arguments.append(f"out={names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}")
        call = f"{function}({', '.join(arguments)})"
        return self._receive(call, step, used) if step.form == "copy" else call

    def _receive(self, call: str, step: Step, used: Set[str]) -> str:
        """Copy fresh results into their registers; one that nothing looks at otherwise stays a local name."""
        targets, copies = [], []
        for position, out in enumerate(step.outs):
            if out is None or out[1] not in used:
                targets.append("_")
            elif not out[0].kept and list(out[0].registers.values()) == [out[1]]:
                targets.append(out[1])
            else:
                targets.append(f"n{position}")
                copies.append(f"{out[1]}.copy_(n{position})")
        received = call if set(targets) == {"_"} else f"{', '.join(targets)}{'' if step.single else ','} = {call}"
        return "; ".join([received, *copies])

    def _used(self) -> set[str]:
        """Registers that something looks at once they are written."""
        found = {name for step in self._steps for name in _registers((step.args, tuple(step.kwargs.values())))}
        for root in self._roots:
            if root.kept or len(root.registers) > 1:
                found.update(root.registers.values())
        return found

    def _text(self, index: int, position: int | str, value: Any) -> str:
        if isinstance(value, Ref):
            return value.name
        if type(value) in _LITERALS:
            return repr(value)
        if isinstance(value, (list, tuple)) and any(_registers(value)):
            inside = ", ".join(self._text(index, f"{position}_{i}", member) for i, member in enumerate(value))
            return f"[{inside}]"
        name = f"c{index}_{position}"
        self.scope[name] = value
        return name


def _released(leaves: Sequence[Any]) -> None:
    raise RuntimeError("this recording was released")


def _registers(template: Any) -> Iterator[str]:
    if isinstance(template, (list, tuple)):
        for member in template:
            yield from _registers(member)
    elif isinstance(template, Ref):
        yield template.name


def _look(root: Root, geometry: Geometry, *, is_current: bool = False) -> torch.Tensor:
    """``is_current``: the owner is an argument of the call under way. That of an earlier one may change its shape or
    memory while other tensors lie where it was; tensors in Python state are checked before each replay."""
    if root.owner is None:
        assert root.storage is not None
        return over(root.storage, geometry)
    if Geometry.of(root.owner) == geometry and (is_current or not root.is_argument):
        return root.owner
    if geometry.dtype == root.owner.dtype:
        with torch.no_grad():  # a view shares the owner's version counter, so writes through it are noticed
            physical = root.owner.conj() if root.owner.is_conj() else root.owner
            view = physical.as_strided(geometry.shape, geometry.stride, geometry.offset)
            return view.conj() if geometry.conj else view
    return _retyped(root.owner, geometry)


def _retyped(owner: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A look of another dtype, as a view where torch makes one, since those share the owner's version counter."""
    try:  # conjugates and what lies otherwise have no such view
        with torch.no_grad():
            parts = owner.is_complex() and geometry.dtype is owner.dtype.to_real()
            whole = torch.view_as_real(owner) if parts else owner.view(geometry.dtype)
            return whole.as_strided(geometry.shape, geometry.stride, geometry.offset)
    except RuntimeError:
        return over(owner.untyped_storage(), geometry)


def _fill(tensor: torch.Tensor) -> None:
    if tensor.numel():
        storage = tensor.untyped_storage()
        whole = Geometry(dtype=torch.uint8, offset=0, shape=(storage.nbytes(),), stride=(1,))
        over(storage, whole).fill_(0xFF)


def python_form(known: Traits) -> Callable[..., Any] | None:
    """A Python binding that may do what the operator does. Only for what can be run twice to prove it."""
    if known.namespace != "aten" or known.draws or known.writes or known.norm is not None:
        return None
    return _torch_private_operators.python_binding(known.base)
