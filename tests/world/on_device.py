"""Put the programs on an accelerator, although none of them names a device.

``torch.set_default_device`` would do, by a mode that every function of torch goes through: eager code would look slower
than it is. So the functions that make tensors are replaced, for the whole process, before a library is imported.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_MAKERS = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "hann_window", "linspace", "logspace", "ones",
    "rand", "randint", "randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip


def _is_ours(caller: types.FrameType) -> bool:
    """Tensors of the library itself are not the program's."""
    return str(caller.f_globals.get("__name__")).startswith("capture.")


def move_programs_to(device: str) -> None:
    """Have functions that make tensors make them on ``device`` where the caller names none."""

    def there(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is None and not _is_ours(sys._getframe(1)):
                kwargs["device"] = device
            return make(*args, **kwargs)

        return made

    for name in _MAKERS:
        setattr(torch, name, there(getattr(torch, name)))
    from_numpy = torch.from_numpy
    setattr(torch, "from_numpy", lambda array: from_numpy(array).to(device))  # noqa: B010 - as no stub allows it
