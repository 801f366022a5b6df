"""Tensors at which autograd graphs end, lent to a body as if no graph did.

Autograd keeps one node for each leaf as long as any graph ends there, and runs it on the stream that was current when
it was made: that of some eager call, which a capture must not touch, as the default stream cannot be captured. For the
length of a run on such a device a leaf is another tensor on the same memory, with the same version counter, in the same
Python object: its node is as old as the run.

Other threads that use the leaf meanwhile would get gradients of the other tensor, or none. So while they may run code
of users (``torch_private.threads``) no object is exchanged: a function mode, which belongs to this thread, hands the
other tensor to each function of torch that the body gives the leaf (``lent_in_this_thread``). It sees no leaf that
reaches autograd below functions, as by ``torch.autograd.Function.apply``; such a call waits until it is alone.

A user's function may run code anew in its backward pass and ask for gradients of what it saved, as adjoint methods do.
Autograd gives it tensors with the nodes of the run's own leaves: so those are lent once more (``SavedLeaves``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from capture.core import forks
from capture.core.interrupts import let_through
from capture.key import pytree
from capture.key.pytree import TENSOR_TYPES
from capture.native import native
from capture.observe.probes.host_reads import gradient_of
from capture.torch_private.capabilities import leaf_like, swap_tensors
from capture.torch_private.devices import captures_kernels
from capture.torch_private.threads import others_may_run

Lent = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By ``id``, the tensors that were lent and the tensors that they replace."""


def is_needed(device: torch.device) -> bool:
    """Whether nodes of leaves belong to streams on this device, which captures must not touch."""
    return captures_kernels(device) and swap_tensors is not None


@contextlib.contextmanager
def lent(
    tensors: Iterable[torch.Tensor], refused: set[int] | None = None,
    stand_in_of: Callable[[torch.Tensor], torch.Tensor] = leaf_like,
) -> Iterator[Lent]:  # fmt: skip
    """Exchange these tensors for the block; other threads would see that, too. A ``grad`` that is set in the block is
    kept. ``refused`` gets the ``id`` of those that could not be exchanged."""
    swap = swap_tensors
    if swap is None:
        yield {}
        return
    pairs: Lent = {}
    tensors = list(tensors)
    if tensors:
        torch.clear_autocast_cache()  # it has weak references, with which torch exchanges no tensor
    try:
        for tensor in tensors:
            stand_in = stand_in_of(tensor)
            if tensor.is_leaf:
                stand_in.grad = gradient_of(tensor)
            try:
                swap(tensor, stand_in)
                pairs[id(stand_in)] = stand_in, tensor
            except RuntimeError as error:  # a weak reference to the tensor exists
                let_through(error)
                if refused is not None:
                    refused.add(id(tensor))
        yield pairs
    finally:
        if pairs:
            torch.clear_autocast_cache()  # the body's own has such references, too
        for stand_in, tensor in pairs.values():
            gradient = gradient_of(tensor)
            swap(tensor, stand_in)
            if tensor.is_leaf and gradient is not gradient_of(tensor):
                tensor.grad = gradient
            stand_in.grad = None  # a graph may keep the tensor, and would keep the gradient with it


@contextlib.contextmanager
def lent_in_this_thread(
    tensors: Iterable[torch.Tensor], stand_in_of: Callable[[torch.Tensor], torch.Tensor] = leaf_like
) -> Iterator[Lent]:
    """As ``lent``, where other threads see nothing of it. Left out are tensors of other classes, whose objects may have
    attributes that functions look for."""
    plain = [tensor for tensor in tensors if type(tensor) in TENSOR_TYPES]
    pairs = [(stand_in_of(tensor), tensor, gradient_of(tensor) if tensor.is_leaf else None) for tensor in plain]
    for stand_in, _, gradient in pairs:
        stand_in.grad = gradient
    stand_ins = _StandIns([(stand_in, tensor) for stand_in, tensor, _ in pairs])
    try:
        with stand_ins:
            yield {id(stand_in): (stand_in, tensor) for stand_in, tensor, _ in pairs}
    finally:
        stand_ins.end()
        for stand_in, tensor, before in pairs:
            gradient = gradient_of(stand_in)
            if tensor.is_leaf and gradient is not before:  # else another thread may have set one
                tensor.grad = gradient
            stand_in.grad = None


_counting = forks.lock()
"""Held while it is counted how many passes use stand-ins."""


class SavedLeaves:
    """What a body was lent and functions of users saved there, for its backward passes. Between these it keeps no
    memory."""

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        """``stand_ins``: by the number of the parameter."""
        self._stand_ins = stand_ins
        self._passes, self._is_exchanged = 0, False
        self._between: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors of the stand-ins, and what they are outside of passes."""

    @contextlib.contextmanager
    def lent(self, parameters: Sequence[torch.Tensor], *, keeps_graph: bool) -> Iterator[None]:
        """Lend them in the block, for the tensors that are the body's ``parameters`` now. ``keeps_graph``: what runs
        there is differentiated later, and needs their memory."""
        if self._is_exchanged:  # a pass inside of another one
            yield
            return
        tensors = [parameters[number] for number in self._stand_ins]
        stand_ins = {id(one): stand_in for one, stand_in in zip(tensors, self._stand_ins.values(), strict=True)}
        native.locked(_counting, self._begin, (tensors,), forks.wait_on)
        versions = [stand_in._version for stand_in in stand_ins.values()]
        try:
            with self._exchanged(tensors, lambda tensor: stand_ins[id(tensor)]):
                yield
        finally:
            native.locked(_counting, self._end, (keeps_graph,), forks.wait_on)
            for tensor, version in zip(tensors, versions, strict=True):
                if stand_ins[id(tensor)]._version != version:  # it has a counter of its own
                    torch.autograd.graph.increment_version(tensor)

    def _begin(self, tensors: Sequence[torch.Tensor]) -> None:
        self._passes += 1
        inner = zip(pytree.leaves([*self._stand_ins.values()]), pytree.leaves([*tensors]), strict=True)
        pairs = [(stand_in, tensor) for (_, stand_in), (_, tensor) in inner]
        if self._passes == 1:
            self._between = [(stand_in, stand_in.data) for stand_in, _ in pairs]
        for stand_in, tensor in pairs:
            stand_in.data = tensor
            if stand_in._backward_hooks is not tensor._backward_hooks:
                stand_in._backward_hooks = tensor._backward_hooks

    def _end(self, keeps_graph: bool) -> None:
        self._passes -= 1
        if self._passes == 0 and not keeps_graph:
            for stand_in, empty in self._between:
                stand_in.data = empty

    @contextlib.contextmanager
    def _exchanged(
        self, tensors: Sequence[torch.Tensor], stand_in_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[None]:
        refused = set[int]()
        with contextlib.ExitStack() as stack:
            if others_may_run():
                stack.enter_context(lent_in_this_thread(tensors, stand_in_of))
            else:
                stack.callback(setattr, self, "_is_exchanged", False)
                self._is_exchanged = True
                stack.enter_context(lent(tensors, refused, stand_in_of))
                rest = [tensor for tensor in tensors if id(tensor) in refused]
                stack.enter_context(lent_in_this_thread(rest, stand_in_of))
            yield


_OF_THE_OBJECT = frozenset({
    torch.Tensor.__hash__, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_, torch.Tensor.set_,
})  # fmt: skip
"""Functions that act on the object itself: who looks for it, or what becomes of it after the run. So do those that set
attributes, but for ``grad``, which is brought back."""


_GRAD: Any = torch.Tensor.grad
_SET_GRAD = _GRAD.__set__


class _StandIns(TorchFunctionMode):
    """Hands functions other tensors than those that they are given, and gives the given ones back."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._stand_ins = {id(tensor): stand_in for stand_in, tensor in pairs}
        self._tensors = {id(stand_in): tensor for stand_in, tensor in pairs}

    def end(self) -> None:
        """Hand nothing out any more, also where a signal left the mode open."""
        self._stand_ins, self._tensors = {}, {}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_THE_OBJECT or (getattr(func, "__name__", "") == "__set__" and func != _SET_GRAD):
            return func(*args, **kwargs)
        given = _exchanged((args, kwargs), self._stand_ins)
        if given is None:
            return func(*args, **kwargs)
        result = func(*given[0], **given[1])
        back = _exchanged(result, self._tensors)
        return result if back is None else back


def _exchanged(value: Any, others: dict[int, torch.Tensor]) -> Any:
    """The value with other tensors in its lists, tuples and dicts; None if it has none that is exchanged."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value))
    kind = type(value)
    if kind is dict:
        changed = {key: other for key, one in value.items() if (other := _exchanged(one, others)) is not None}
        return {**value, **changed} if changed else None
    if kind is not list and kind is not tuple:
        return None
    members = [_exchanged(one, others) for one in value]
    if all(member is None for member in members):
        return None
    return kind(one if member is None else member for one, member in zip(value, members, strict=True))
