"""Hooks around the step of an optimizer: those of the object, and those of all optimizers.

torch documents how hooks are registered, not where they are kept. Where a probe does not find them there, every
optimizer counts as one with hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as _module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from capture.torch_private.probe import probe

_OWN = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_LIBRARY = __name__.partition(".")[0]


def _hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    tables = [vars(optimizer)[name] for name in _OWN] + [vars(_module)[name] for name in _GLOBAL]
    return [hook for table in tables for hook in table.values()]


@probe  # not at import: the first optimizer of a process imports torch._dynamo, which takes a second
def _finds_hooks() -> bool:
    optimizer = torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)], lr=0.1)

    def hook(*_: Any) -> None:
        pass

    registered = (
        optimizer.register_step_pre_hook(hook), optimizer.register_step_post_hook(hook),
        register_optimizer_step_pre_hook(hook), register_optimizer_step_post_hook(hook),
    )  # fmt: skip
    try:
        return sum(registered_hook is hook for registered_hook in _hooks(optimizer)) == len(registered)
    finally:
        for handle in registered:
            handle.remove()


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Functions that are none of this library's run before or after its steps."""
    if not _finds_hooks() or any(name not in vars(optimizer) for name in _OWN):
        return True
    return any(not str(getattr(one, "__module__", "")).startswith(_LIBRARY) for one in _hooks(optimizer))
