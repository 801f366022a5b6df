"""One call of one captured function, with its arguments bound and its dynamic leaves named."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve, field

from capture.core.data import define
from capture.core.facts import OpaqueLeaf
from capture.core.options import Annotation
from capture.key import objects, pytree
from capture.key.objects import TooDeep, Visit
from capture.key.pytree import PLAIN_TYPES
from capture.key.signature import Binder, Leaf
from capture.state import body_run, snapshot
from capture.state.amounts import Amounts
from capture.state.code_run import CodeRun
from capture.state.optimizers import Optimizers
from capture.state.source import Source
from capture.state.unreached import Unreached


def _no_changes(_: tuple[str, ...]) -> frozenset[int]:
    return frozenset()


@define(kw_only=True)
class Call:
    """One call. ``values``: one for each parameter, without the receiver; ``leaves``: the tensors and generators in
    them, in the order of the key."""

    annotation: Annotation
    function: Callable[..., Any]
    """The user's function; a method's receiver is bound when it runs."""
    receiver: Any
    binder: Binder
    values: tuple[Any, ...]
    leaves: list[Leaf]
    _paths: list[tuple[str, Leaf]] | None = field(default=None, init=False)
    keeps_program: bool = False
    """The body's autograd graph is kept after the run, as the program of a region."""
    watched: Any = None
    """The ``ObservedRun`` of the call's present or last run."""
    put_out: Callable[[], None] | None = None
    """Copies what the run has written so far to the caller's tensors, where the run works on copies of them. May be
    called more than once."""
    code: CodeRun | None = None
    """The code that the body ran in earlier calls, for runs in which it is not noted."""
    optimizers: Optimizers = field(factory=Optimizers)
    """Optimizers that the function was seen to use."""
    unreached: Unreached = field(factory=Unreached)
    """Functions that it was seen to run, and that nothing else leads to."""
    amounts: Amounts | None = None
    """How much a run adds to a number in a place that counts as an argument, as far as that was
    proven; None for every other change."""
    changes: Callable[[tuple[str, ...]], frozenset[int]] = _no_changes
    """For what a run read: the places among those that count as arguments which such runs were seen to change."""
    is_tried: bool = False
    """The run is a try that nobody may notice: it ends where it would leave what cannot be undone (``printing``)."""
    formulas: Any = None
    """What is known of numbers that the run computes of others (``observe.computed.Formulas``)."""
    by_mode: bool = False
    """Runs are watched by a dispatch mode: torch computes more of what the body does by operators then."""
    undo: Any = None
    """The former state of everything outside of the pool that a recording run changed because it had to execute a
    part."""

    def forget_run(self) -> None:
        """Drop the run. It refers to its call, so that its tensors would otherwise live until the next garbage
        collection."""
        self.watched = self.put_out = self.undo = None

    def run(self, values: tuple[Any, ...] | None = None) -> Any:
        """The function that is watched and recorded: the body, called with these values or with the caller's own."""
        return self.run_plainly(values)

    def settle(self, node: Any) -> None:
        """A recording was made of this call's last run."""

    def place_in_result(self, place: str) -> str:
        """The path, in the result of ``run``, of what is at this path of the body's result: ``output.1``."""
        return place

    def whole(self, result: Any) -> Any:
        """The result of ``run``, put together again with everything that belongs to it, such as tensors for the
        backward pass."""
        return result

    def run_plainly(self, values: tuple[Any, ...] | None = None) -> Any:
        """Run the body alone, not as the forward pass of a region."""
        function = self.function if self.receiver is None else types.MethodType(self.function, self.receiver)
        values = self.values if values is None else values
        run = body_run.current()
        if run is None:
            return self.binder.call(function, values)
        run.begin(is_own=values is self.values)
        try:
            result = self.binder.call(function, values)
        except BaseException as error:
            run.error = error
            raise
        run.end(result)
        return result

    def named_values(self, values: tuple[Any, ...] | None = None) -> dict[str, Any]:
        """Values by path of their parameter; members of ``**kwargs`` under their own names."""
        return _named(self.binder, self.values if values is None else values)

    def named_roots(self) -> dict[str, Any]:
        """The roots of this call's sources, by name: the values, and the receiver."""
        return named_roots(self.binder, self.values, self.receiver)

    def paths(self, values: tuple[Any, ...] | None = None) -> list[tuple[str, Leaf]]:
        """Paths of the dynamic leaves, in the order of ``leaves``. Those of the caller's own arguments are taken at the
        first use, before the body changes anything."""
        if values is None:
            if self._paths is None:
                self._paths = self.paths(self.values)
            return self._paths
        return [
            (path, leaf)
            for path, leaf in self.all_leaves(values)
            if issubclass(type(leaf), (torch.Tensor, torch.Generator))
        ]

    def all_leaves(self, values: tuple[Any, ...] | None = None) -> Iterator[tuple[str, Any]]:
        """Everything in the arguments as they are now that is no container, with paths."""
        visit = Visit()
        for name, value in zip(self.binder.names, self.values if values is None else values, strict=True):
            if self.is_whole(name, value):
                yield name, value
                continue
            for path, leaf in pytree.leaves(value, "" if name == self.binder.keywords else name, visit):
                yield path.removeprefix("."), leaf

    def containers(self) -> Iterator[tuple[str, Any]]:
        """The containers in the arguments, with paths."""
        visit = Visit()
        stack = [named for named in self.named_values().items() if not self.is_whole(*named)]
        while stack:
            path, value = stack.pop()
            if pytree.is_container(value) and visit.is_new(value):
                yield path, value
                stack += [(f"{path}{suffix}", member) for suffix, member in pytree.children(value)]

    def is_whole(self, name: str, value: Any) -> bool:
        """Whether an object in ``static=`` is not opened, but read where it is."""
        kind = type(value)
        return name in self.annotation.static and pytree.is_object(kind) and not pytree.has_fields(kind)

    def substitute(self, replacements: dict[int, Leaf], values: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """The values given, or the caller's own, with leaves replaced by position. A container of which no member
        changed is kept."""
        position = iter(range(len(self.leaves)))

        def replace(leaf: Any) -> Any:
            if not issubclass(type(leaf), (torch.Tensor, torch.Generator)):
                return leaf
            replacement = replacements.get(next(position), leaf)
            if type(leaf) is torch.nn.Parameter and type(replacement) is torch.Tensor:
                replacement.__class__ = torch.nn.Parameter  # code may ask for the class
            return replacement

        visit, values = Visit(joins=True), self.values if values is None else values
        return tuple(
            value if self.is_whole(name, value) else pytree.replace_leaves(value, replace, visit)
            for name, value in zip(self.binder.names, values, strict=True)
        )

    def is_static(self, path: str) -> bool:
        """Whether a name in ``static=`` covers this path."""
        return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in self.annotation.static)

    def roots(self, values: tuple[Any, ...] | None = None) -> list[Source]:
        """Where a walk over the Python state begins that the body can reach, called with these values or with the
        caller's own."""
        return snapshot.roots(self.function, self.receiver, self.named_values(values)) + self.unreached.roots()

    def classes(self) -> Sequence[type]:
        """Classes whose methods C code calls for the body, that nothing else need lead to."""
        return ()

    def further_starts(self) -> Sequence[tuple[Any, str]]:
        """Objects that C code hands to the body, with their paths."""
        return ()

    def unseen_functions(self) -> Sequence[types.FunctionType]:
        """Functions that look up methods of ``classes`` and that are not noted when they run."""
        return ()

    def opaque_leaves(self) -> list[OpaqueLeaf]:
        """Leaves that are no plain value, tensor or module and whose tensors, if any, are not declared static."""
        opaque = []
        for path, leaf in self.all_leaves():
            if is_opaque(leaf) and not self.is_static(path) and not self._is_known(leaf):
                num_tensors = pytree.count_tensors(leaf)
                kind = type(leaf).__qualname__
                opaque.append(OpaqueLeaf(path=path, type=kind, role="argument", num_tensors=num_tensors))
        return opaque

    @staticmethod
    def _is_known(leaf: Any) -> bool:
        """Whether objects of its class are opened, or ``static=`` says that it is read where it is."""
        return type(leaf) in objects.opened or objects.is_state(leaf)

    def unkeyable(self, reason: str) -> OpaqueLeaf:
        """The leaf to name in a message, where a call has no key."""
        for name, value in self.named_values().items():
            try:
                any(False for _ in pytree.leaves(value))
            except TooDeep:
                return OpaqueLeaf(
                    path=name, type=type(value).__qualname__, role="argument", num_tensors=0, endless=True
                )
        opaque = self.opaque_leaves() or [OpaqueLeaf(path=reason, type=reason, role="argument", num_tensors=0)]
        return evolve(opaque[0], keyless=not opaque[0].num_tensors)


def is_opaque(leaf: object) -> bool:
    """Whether it is neither a plain value nor a tensor, nor an object whose state is watched anyway."""
    watched = (torch.Tensor, torch.Generator, torch.nn.Module, torch.optim.Optimizer, type)
    return type(leaf) not in PLAIN_TYPES and not issubclass(type(leaf), watched) and not callable(leaf)


def named_roots(binder: Binder, values: tuple[Any, ...], receiver: Any) -> dict[str, Any]:
    """The same for a call that has not been made."""
    named = _named(binder, values)
    if receiver is not None:
        named["self"] = receiver  # of a function it is a parameter
    return named


def _named(binder: Binder, values: tuple[Any, ...]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in zip(binder.names, values, strict=True):
        if name == binder.keywords:
            named.update(value)
        else:
            named[name] = value
    return named
