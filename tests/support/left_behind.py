"""What a test may leave in the process by mistake, so that another one fails that has nothing to do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer

from capture.observe.capture_lock import capture_lock
from tests.support.device import HAS_DEFAULT

_HOOKS = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
_LOOKS: dict[str, Callable[[], Any]] = {
    "torch functions are switched off": lambda: not torch._C._is_torch_function_enabled(),
    "the next torch function is left out": getattr(torch._C, "_peek_should_skip_torch_function", bool),
    "a mode of operators": torch._C._len_torch_dispatch_stack,
    "a mode of torch functions": lambda: torch._C._len_torch_function_stack() > HAS_DEFAULT,
    "hooks of all optimizers": lambda: any(_HOOKS),
    "the lock of captures": capture_lock._is_owned,
    "inference mode": torch.is_inference_mode_enabled,
    "no gradients": lambda: not torch.is_grad_enabled(),
    "another default type": lambda: torch.get_default_dtype() is not torch.float32,
}


def left_behind() -> list[str]:
    """What is there and should not be. It is taken away, as far as it can be."""
    found = [name for name, look in _LOOKS.items() if look()]
    if found:
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)  # type: ignore[attr-defined]
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        for hooks in _HOOKS:
            hooks.clear()
    return found
