"""Settings such as the learning rate are Python values that only the optimizer's own code reads.

A recording freezes them, so those of every optimizer that takes a step in a body are part of its key. A setting kept
in a tensor is read where it lives. Whether a parameter has a gradient is such a value too: it decides what an optimizer
updates, what is clipped or zeroed, and whether a backward pass accumulates. So are a parameter's hooks, and the
training flags of modules that the body reaches and that are neither its own nor arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from capture.key.code_names import part_of
from capture.key.signature import training_reader
from capture.state.snapshot import Change, Snapshot


def _may_step(function: Any) -> bool:
    """The function's own code names a ``step``, or cannot be looked at."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return type(code) is not types.CodeType or _names_step(code)


def _names_step(code: types.CodeType) -> bool:
    return "step" in code.co_names or any(_names_step(one) for one in code.co_consts if type(one) is types.CodeType)


class Optimizers:
    """What one captured function was seen to reach: optimizers, parameters whose ``grad`` it looked at, and modules."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[torch.optim.Optimizer]] = []
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        """Each with all its submodules."""
        self.has_looked = False
        """Python state was searched for them."""

    def __bool__(self) -> bool:
        return bool(self._found or self._parameters)

    def note(self, state: Snapshot, function: Any, inputs: Sequence[Any]) -> None:
        """Look for more of them in what a body can reach. ``inputs``: the receiver and the arguments.

        An optimizer that is only near, as one that a trainer keeps, is none of the body's: its own code tells before
        the first run whether one may take a step. Which ones do, ``watching`` sees."""
        self.has_looked = True
        for _, value in state.entered if _may_step(function) else ():
            if isinstance(value, torch.optim.Optimizer):
                self._add(value)
        above = [one for one in (*inputs, *self.modules()) if isinstance(one, torch.nn.Module)]
        covered = {id(member) for one in above for member in one.modules()}
        for module in state.modules:
            if id(module) not in covered:
                self._modules.append(weakref.ref(module))
                covered |= {id(member) for member in module.modules()}

    def modules(self) -> list[torch.nn.Module]:
        """Modules whose flags are part of the key, without their submodules."""
        return [module for one in self._modules if (module := one()) is not None]

    def flags(self) -> list[bool]:
        """Training flags of all modules."""
        return [flag for module in self.modules() for flag in training_reader(module)()]

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        if all(one() is not optimizer for one in self._found):
            self._found.append(weakref.ref(optimizer))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Those that take a step inside the block are found, however hidden they are."""
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._add(optimizer))
        try:
            yield
        finally:
            hook.remove()

    def note_gradients(
        self, read: Iterable[Any], changed: Iterable[Change], before: Snapshot, stand_ins: Collection[int]
    ) -> None:
        """After a run: whether a tensor has a gradient is part of the key from now on, if the body looked at it, or if
        it came or went, and the tensor was there before: in Python state, or as an argument that is always the same.

        ``read``: tensors whose ``grad`` was looked at; ``stand_ins``: ``id`` of tensors that stood for arguments."""
        came = [one.source.holder for one in changed if one.source.name == "grad" and not one.container]
        tensors = [one for one in (*read, *came) if isinstance(one, torch.Tensor)]
        candidates = {id(one): one for one in tensors if one.is_leaf or one.retains_grad}
        if not candidates:
            return
        there = {id(tensor) for owners in before.tensors.values() for _, tensor in owners}
        there |= {id(p) for one in self._alive() for group in one.param_groups for p in group["params"]}
        there.difference_update(stand_ins)
        there -= {id(one()) for one in self._parameters}
        self._parameters += [weakref.ref(one) for key, one in candidates.items() if key in there]

    def part(self) -> tuple[Any, ...]:
        """The key's part: all settings as they are now, without the parameters, which gradients there are, flags."""
        settings = [part_of(value, limit=None) for _, value in self._settings()]
        gradients = [(one.grad is None, *(one._backward_hooks or ())) for one in self._watched()]
        return (*settings, *gradients, *self.flags())

    def labels(self) -> list[str]:
        """Names of the parts."""
        names = [
            *[name for name, _ in self._settings()],
            *["the lack of a gradient, or hooks" for _ in self._watched()],
        ]
        return [*names, *["a module's training flag" for _ in self.flags()]]

    def _watched(self) -> list[torch.Tensor]:
        return [parameter for one in self._parameters if (parameter := one()) is not None]

    def _alive(self) -> list[torch.optim.Optimizer]:
        return [optimizer for one in self._found if (optimizer := one()) is not None]

    def _settings(self) -> Iterable[tuple[str, Any]]:
        for one in self._alive():
            several = len(one.param_groups) > 1
            for number, group in enumerate(one.param_groups):
                source = f"param_groups[{number}]" if several else type(one).__name__
                yield from ((f"{name} of {source}", value) for name, value in group.items() if name != "params")
