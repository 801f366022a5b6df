"""Host reads that no dispatch mode sees: ``tolist``, ``numpy`` and printing take a CPU tensor's memory directly.

While a body is watched, ``torch.Tensor`` gets wrappers that note the call. They act in the watching thread only
and are taken off again afterwards.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import get_default_nowrap_functions

from capture.core.data import frozen
from capture.observe.probes.host_arguments import host_arguments
from capture.torch_private import autocast, devices
from capture.torch_private.checkpoints import is_asking, is_checkpoint
from capture.torch_private.monkeypatch import Listening, Replaced, is_asked_by_users, made_once, replaced
from capture.torch_private.threads import others_may_run

_NAMES = ("__dlpack__", "apply_", "map_", "map2_")
_COMPARED = ("tolist", "numpy", "__array__", "__repr__", "__format__")
_MOST_LISTED = 8  # elements: a replay waits for each of them, eager code once for all
Read = Callable[[str, torch.Tensor, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Name, tensor, what reads it, and what that gets beside it."""
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
_GRAD: Any = torch.Tensor.grad
_looking: list[None] = []
"""Not empty while this library looks at a ``grad``."""
_EXPORTS = ("__dlpack__", "__cuda_array_interface__")

get_default_nowrap_functions()  # torch keeps what it finds on its first look, and importing dynamo is one (2.11 raises)


@frozen(eq=False)
class _HostReads:
    note_sync: Callable[[str], None]
    read: Read
    exported: Callable[[torch.Tensor], None]
    resized: Callable[[torch.UntypedStorage, int], None]


@frozen(eq=False)
class _GraphUses:
    note_use: Callable[[str], None]
    checkpoint: Callable[[], None]


_reads, _uses = Listening(), Listening()


@contextmanager
def host_reads(
    note_sync: Callable[[str], None],
    read: Read,
    exported: Callable[[torch.Tensor], None],
    resized: Callable[[torch.UntypedStorage, int], None],
) -> Iterator[None]:
    """Call ``note_sync(name)`` before each host read in this thread, for the length of the block, and ``read`` in the
    place of those that may be compared; ``exported(tensor)`` before a device tensor is handed to another library, and
    ``resized(storage, nbytes)`` before a storage gets that many bytes."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    stand_ins = _syncing(tensor, _NAMES) | _reading(tensor, _COMPARED) | _addresses(tensor, ("data_ptr",))
    stand_ins |= _interfaces(tensor, ("__cuda_array_interface__",))
    memory = _addresses(storage, ("data_ptr",)) | _resizing(storage, ("resize_",))
    arguments, functions = host_arguments(read)
    told = _reads.by(_HostReads(note_sync, read, exported, resized))
    with told, arguments, Replaced((tensor, stand_ins), (storage, memory), *functions):
        yield


def _interface(_: str, original: Any) -> Any:
    def read_interface(tensor: torch.Tensor) -> Any:
        if threading.get_ident() == _reads.thread:
            _reads.to.exported(tensor)
        return original.fget(tensor)

    return property(read_interface)


def _address(_: str, original: Any) -> Any:
    """Whoever has the address of host memory reads and writes there without a word. torch's own code compares it."""

    @functools.wraps(original)
    def read(holder: Any) -> Any:
        if threading.get_ident() == _reads.thread and holder.device.type == "cpu" and is_asked_by_users():
            _reads.to.note_sync("data_ptr")
        return original(holder)

    return read


def _resize(_: str, original: Any) -> Any:
    """Tells where code gives a storage other memory, as ``fully_shard`` does to what it gathers. No operator does."""

    def resize(self: torch.UntypedStorage, nbytes: int) -> Any:
        if threading.get_ident() != _reads.thread:
            return original(self, nbytes)
        _reads.to.resized(self, nbytes)
        # memory of a pool on the CPU cannot be given up: the recording is refused, and the body goes on with it
        return original(self, nbytes) if self.device.type != "cpu" or self.resizable() else self

    return resize


@contextmanager
def graph_uses(note_use: Callable[[str], None], checkpoint: Callable[[], None]) -> Iterator[None]:
    """Call ``note_use(name)`` where code in this thread hooks itself into the autograd graph; ``checkpoint()`` where
    that is a block that the backward pass runs again."""
    stand_ins = Replaced(
        (torch.Tensor, _hooking(torch.Tensor, _HOOKS) | _nodes(torch.Tensor, ("grad_fn",))),
        (saved_tensors_hooks, _entering(saved_tensors_hooks, ("__enter__",))),
        (graph, _refusing(graph, ("disable_saved_tensors_hooks",))),
    )
    with _uses.by(_GraphUses(note_use, checkpoint)), stand_ins:
        yield


def _node(_: str, original: Any) -> Any:
    def read_grad_fn(tensor: torch.Tensor) -> Any:
        if threading.get_ident() == _uses.thread and not is_asking():
            _uses.to.note_use("grad_fn")
        return original.__get__(tensor)

    return property(read_grad_fn)


def _hook(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def register(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == _uses.thread:
            _uses.to.note_use(name)
        return original(tensor, *args, **kwargs)

    return register


def _enter(_: str, original: Any) -> Any:
    def use_hooks(hooks: saved_tensors_hooks) -> None:
        if threading.get_ident() == _uses.thread:
            to: _GraphUses = _uses.to
            to.checkpoint() if is_checkpoint(hooks) else to.note_use("hooks on saved tensors, as a checkpoint does")
        original(hooks)

    return use_hooks


def _refuse(_: str, original: Any) -> Any:
    def refuse_hooks(error_message: str) -> Any:
        if threading.get_ident() == _uses.thread:
            _uses.to.note_use("torch.func, or what else allows no hooks on saved tensors")
        return original(error_message)

    return refuse_hooks


@contextmanager
def gradient_reads(
    dropped: Callable[[torch.Tensor], object], watched_tensors: Collection[int]
) -> Iterator[list[torch.Tensor]]:  # fmt: skip
    """The tensors whose ``grad`` code in this thread reads in the block, or for which it computes gradients. Only
    tensors whose ``id`` is in ``watched_tensors`` are listed, so that none that the body makes is kept alive.
    ``dropped(gradient)`` is called where code replaces a gradient by another one or by None."""
    thread, read = threading.get_ident(), list[torch.Tensor]()

    def read_grad(tensor: torch.Tensor) -> Any:
        if threading.get_ident() == thread and not _looking and id(tensor) in watched_tensors:
            read.append(tensor)
        return _GRAD.__get__(tensor)

    def write_grad(tensor: torch.Tensor, value: Any) -> None:
        old = _GRAD.__get__(tensor) if threading.get_ident() == thread else None
        _GRAD.__set__(tensor, value)
        if old is not None and old is not value:
            dropped(old)

    original = torch.autograd.grad

    @functools.wraps(original)
    def differentiate(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if threading.get_ident() == thread:
            read.extend(
                input_ for input_ in inputs if isinstance(input_, torch.Tensor) and id(input_) in watched_tensors
            )
        return original(outputs, inputs, *args, **kwargs)

    grad = property(read_grad, write_grad, _GRAD.__delete__)
    with Replaced((torch.autograd, {"grad": differentiate}), (torch.Tensor, {"grad": grad})):
        yield read


@contextmanager
def no_gradient_reads() -> Iterator[None]:
    """In the block ``grad`` is looked at by this library, not by the body."""
    _looking.append(None)
    try:
        yield
    finally:
        _looking.clear()


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Its ``grad``, where the look is not the body's. Under a function mode, such as a default device, torch looks the
    attribute up by its name."""
    with no_gradient_reads():
        gradient: torch.Tensor | None = _GRAD.__get__(tensor)
    return gradient


@contextmanager
def autocast_switches(state: dict[str, bool]) -> Iterator[None]:
    """Keep ``state`` (device type -> on) up to date while a body enters and leaves ``torch.autocast``."""
    thread = threading.get_ident()
    original = torch.set_autocast_enabled
    state.update({kind: torch.is_autocast_enabled(kind) for kind in devices.AUTOCAST_TYPES})

    @functools.wraps(original)
    def switch(*args: Any) -> None:
        original(*args)
        if threading.get_ident() == thread:
            kind, enabled = args if len(args) == 2 else (devices.DEFAULT_AUTOCAST_TYPE, args[0])
            state[str(kind)] = bool(enabled)

    with replaced(torch, {"set_autocast_enabled": switch}):
        yield


@contextmanager
def own_autocast_cache(at_end: Callable[[], None]) -> Iterator[None]:
    """Weights that autocast casts are kept for the body alone, in a block of the caller's: one that was cast outside
    would be frozen, one cast inside would outlive the recording. Within the body they are shared as in eager code,
    which adds up the gradients of all uses in the low precision; ``at_end`` is called while they are there. The cache
    is the process's: where other threads may use it, it is left alone, and the body does without. Blocks that the body
    opens take their casts with them."""
    if not devices.autocast_depth() and not _autocast_is_on():
        yield
        return
    if others_may_run():
        with no_autocast_cache():
            yield
        return
    with autocast.cleared():
        yield
        at_end()


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Every use of a weight casts it anew, in this thread."""
    thread = threading.get_ident()
    cached, original = torch.is_autocast_cache_enabled(), torch.set_autocast_cache_enabled

    @functools.wraps(original)
    def switch(enabled: bool) -> None:
        original(enabled and (threading.get_ident() != thread or not _autocast_is_on()))

    try:
        with replaced(torch, {"set_autocast_cache_enabled": switch}):
            switch(cached)
            yield
    finally:
        original(cached)


def _autocast_is_on() -> bool:
    return any(map(torch.is_autocast_enabled, devices.AUTOCAST_TYPES))


def _is_listed(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested and 0 < tensor.numel() <= _MOST_LISTED


def _listed(tensor: torch.Tensor) -> Any:
    """``tolist`` as single reads, which are seen as operators and can be compared."""
    return [_listed(one) for one in tensor.unbind()] if tensor.dim() else tensor.item()


def _sync(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == _reads.thread and name in _EXPORTS and tensor.device.type != "cpu":
            _reads.to.exported(tensor)
        elif threading.get_ident() == _reads.thread:
            _reads.to.note_sync(name)
        return original(tensor, *args, **kwargs)

    return read


def _compared(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != _reads.thread:
            return original(tensor, *args, **kwargs)
        if name == "tolist" and tensor.device.type != "cpu" and _is_listed(tensor):
            return _listed(tensor.detach())
        return _reads.to.read(name, tensor, original, args, kwargs)

    return reading


_syncing, _reading, _addresses = made_once(_sync), made_once(_compared), made_once(_address)
_interfaces, _resizing = made_once(_interface), made_once(_resize)
_hooking, _nodes, _entering, _refusing = map(made_once, (_hook, _node, _enter, _refuse))
