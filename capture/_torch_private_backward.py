"""Names of torch about the backward pass under way, behind a probe with a stated fallback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

will_execute: Callable[[Any], bool] | None = getattr(torch._C, "_will_engine_execute_node", None)
"""Whether the pass under way is going to run a node: not one that leads to none of the inputs it was asked for. Without
it no pass can be told from one for chosen inputs, and gradients of parameters go through autograd."""
