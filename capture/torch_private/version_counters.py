"""Setting tensors' version counters.

Autograd counts the writes to each tensor, so that a backward pass can tell that what it saved was written since. A run
whose writes did not happen must not count. Without torch's name the counters stay too high: nobody gets other values,
as the write that is made once was there to be counted, but ``_version`` differs from eager's.

Source: ``torch/autograd/grad_mode.py`` (``_unsafe_preserve_version_counter``), 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_set: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], object] | None
_set = getattr(getattr(torch._C, "_autograd", None), "_unsafe_set_version_counter", None)


def set_back(versions: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Give tensors the versions they had. Doing that twice is the same."""
    moved: list[Any] = [(tensor, version) for tensor, version in versions if tensor._version != version]
    if moved and _set is not None:
        _set(*zip(*moved, strict=True))
