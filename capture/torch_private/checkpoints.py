"""Blocks under ``torch.utils.checkpoint`` without reentry, which put hooks on what autograd saves in them.

torch has no switch for them but the hooks' class, and says what such a block runs again in closures alone. Fallback
where a name is not found: such a block is one with hooks of unknown kind, and the function around it runs eagerly.
"""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from capture.torch_private.capabilities import FUNCTION_MODES
from capture.torch_private.devices import is_capturing_now
from capture.torch_private.monkeypatch import replaced

_STATE = "fwd_cpu_state"  # what the generator of the CPU drew from as the block began
_DEVICE_STATES = "fwd_device_states"  # the same of accelerators, where one was in use
_KEEPS_STATE = "preserve_rng_state"  # whether the generators are set to what they were, and back


RUN_ONCE_ERROR = (
    "Trying to backward an extra time. You are only allowed to backward once on any region computed under selective "
    "activation checkpoint."
)


class Block(NamedTuple):
    """A block under a checkpoint, as it is run again."""

    function: types.FunctionType
    """Takes ``args``. The user's function and all else are in its cells."""
    args: tuple[Any, ...]
    stops_early: bool
    """The second run ends as soon as it has saved all that the first run saved."""
    metadata: Callable[[torch.Tensor], Any] | None
    """Gives the metadata of a saved tensor that have to be the same in both runs; None: nothing is compared."""


_GRAD_FN: Any = torch._C.TensorBase.grad_fn  # torch's own: while a body is watched, a wrapper is in its place


def is_asking() -> bool:
    """Whether the caller's caller is the code of checkpoints: before torch 2.12 it asks whether to keep inputs.

    A default device is a mode of torch functions: where one is set, the mode's own code lies in between, and the caller
    is called twice.
    """
    module, frame, probe = _module(), sys._getframe(2), sys._getframe(1).f_globals
    if module is None:
        return False
    passes_on = (*FUNCTION_MODES, probe["__name__"])
    while frame.f_globals.get("__name__") in passes_on and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals is module.__dict__


def _module() -> Any:
    """The module ``torch.utils.checkpoint``; None where nobody imported it."""
    return sys.modules.get("torch.utils.checkpoint")


def _hook_class() -> Any:
    """The class of the hooks that a checkpoint sets; None where the module is not imported or this torch has another
    class."""
    return getattr(_module(), "_checkpoint_hook", None)


def _in_closure(function: Any, name: str) -> Any:
    names, cells = function.__code__.co_freevars, function.__closure__
    return cells[names.index(name)].cell_contents


def is_checkpoint(hooks: Any) -> bool:
    """Whether these hooks are those of a block that the backward pass runs again, with the same draws."""
    if type(hooks) is not _hook_class():
        return False
    try:
        function = _in_closure(hooks.pack_hook, "frame").recompute_fn
        return _in_closure(function, _KEEPS_STATE) is True and isinstance(_in_closure(function, _STATE), torch.Tensor)
    except (AttributeError, ValueError, TypeError):
        return False


def block_of(hooks: Any) -> Block:
    """Of hooks that ``is_checkpoint`` knows. Asked for where hooks on saved tensors give these back as they are."""
    frame = _in_closure(hooks.pack_hook, "frame")
    if hasattr(frame, "get_inputs"):
        args = frame.get_inputs()
    else:  # before torch 2.12
        node = _GRAD_FN.__get__(frame.input_saver)
        args = node.get_args(node.saved_tensors)
    return Block(frame.recompute_fn, tuple(args), bool(frame.early_stop), frame.metadata_fn)


def state_of(function: types.FunctionType) -> torch.Tensor:
    """What the generator of the CPU drew from as the block began whose function this is."""
    found: torch.Tensor = _in_closure(function, _STATE)
    return found


def device_states_of(function: types.FunctionType) -> list[torch.Tensor]:
    """The states that the generators of accelerators had as the block began."""
    try:
        found: list[torch.Tensor] = _in_closure(function, _DEVICE_STATES)
    except ValueError:  # no accelerator was in use, or a torch that has none
        found = []
    return found


def keep_no_state(function: types.FunctionType) -> None:
    """Have the block draw from generators as they are, and not set them first."""
    names, cells = function.__code__.co_freevars, function.__closure__
    assert cells is not None
    cells[names.index(_STATE)].cell_contents = None
    cells[names.index(_KEEPS_STATE)].cell_contents = False


def raise_mismatch(text: str) -> None:
    """What torch raises where the second run saves other tensors than the first."""
    raise _module().CheckpointError(f"torch.utils.checkpoint: {text}")


@contextmanager
def without_recomputing(begin: Callable[[Any], bool] = bool, end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """In the block what checkpoints in this thread save stays with whose hooks are there already. ``begin(hooks)`` is
    called where one begins that is in no other one, and tells whether it is to be so; ``end()`` where that ends."""
    kind, thread = _hook_class(), threading.get_ident()
    if kind is None:
        yield
        return
    enter, leave, passed = kind.__enter__, kind.__exit__, list[int]()

    def enter_block(hooks: Any) -> None:
        if threading.get_ident() == thread and is_checkpoint(hooks) and (passed or begin(hooks)):
            passed.append(id(hooks))
        else:
            enter(hooks)

    def leave_block(hooks: Any, *error: Any) -> None:
        if passed and passed[-1] == id(hooks):
            passed.pop()
            if not passed and not any(error):
                end()
        else:
            leave(hooks, *error)

    # a capture must not ask a device's generator for its state; what runs again in other calls has a state of their own
    is_asked = is_capturing_now() and hasattr(_module(), "get_device_states")
    states = {"get_device_states": _no_states} if is_asked else {}
    with replaced(kind, {"__enter__": enter_block, "__exit__": leave_block}), replaced(_module(), states):
        yield


def _no_states(*_: object) -> tuple[list[int], list[torch.Tensor]]:
    return [], []


# ------------------------------------------------------------------------------------------------------ selective ones
def keeps_results(context: Any) -> bool:
    """Whether the second run of a selective checkpoint in this context finds the results that the first one kept."""
    kind = getattr(_module(), "_CachedTorchDispatchMode", None)
    return kind is not None and type(context) is kind and isinstance(getattr(context, "storage", None), dict)


def kept_results(context: Any) -> list[tuple[Any, list[Any]]]:
    """Operators, and what was kept of each."""
    found = []
    for operator, entries in context.storage.items():
        rows = entries.values() if isinstance(entries, dict) else entries
        found.append((operator[0] if isinstance(operator, tuple) else operator, list(rows)))
    return found


def with_results(context: Any, replace: Callable[[Any], Any]) -> Any:
    """The same context with other results; ``replace`` gets each."""
    wrapper = _module()._VersionWrapper

    def again(entry: Any) -> Any:
        if type(entry) is wrapper:
            made = replace(entry.val)
            copied = copy.copy(entry)
            copied.val, copied.version = made, made._version if isinstance(made, torch.Tensor) else None
            return copied
        if type(entry) in (tuple, list):
            return type(entry)([again(member) for member in entry])
        return entry

    copied = copy.copy(context)
    copied.storage = {
        operator: {at: again(member) for at, member in entries.items()} if isinstance(entries, dict) else again(entries)
        for operator, entries in context.storage.items()
    }
    if hasattr(copied, "func_counter"):
        copied.func_counter = type(copied.func_counter)(int)
    return copied
