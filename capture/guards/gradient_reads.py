"""Whether anything that a recording does can depend on which static tensors require a gradient.

Where gradient mode is off, operators do the same for a tensor that requires a gradient and for one that does not. What
is left is code that asks a tensor, or that switches the mode on: it has to name what it asks for. To ask 200 tensors in
every call takes more time than all else that is compared of them.
"""

from __future__ import annotations

import types

import torch

from capture.core.facts import Facts
from capture.guards.names_used import uses_of
from capture.state.code_run import CodeRun

_ASKING = frozenset({
    "requires_grad", "requires_grad_", "is_leaf", "grad_fn", "retains_grad", "retain_grad", "needs_input_grad",
    "register_hook", "register_post_accumulate_grad_hook", "backward", "detach_", "resize", "resize_",
    "numpy", "__array__", "__dlpack__", "from_dlpack", "to_dlpack", "_any_requires_grad",
})  # fmt: skip
"""Attributes and methods of tensors that tell it, or that raise for a tensor that requires a gradient."""
_SWITCHING = frozenset({
    "enable_grad", "set_grad_enabled", "_set_grad_enabled", "inference_mode", "_InferenceMode", "_enter_inference_mode",
})  # fmt: skip
"""What can switch gradient mode on."""
_SWITCHING_OFF = frozenset(
    vars(torch.no_grad)[name].__code__ for name in ("__init__", "__enter__", "__exit__") if name in vars(torch.no_grad)
)


def depends_on_gradients(facts: Facts, ran: CodeRun) -> bool:
    """Whether a recording that is made now depends on it. What the host reads of a tensor may raise for one that
    requires a gradient, and islands are not looked into."""
    if torch.is_grad_enabled() or facts.reads or facts.islands:
        return True
    return any(_asks(code) for code in ran.codes if code not in _SWITCHING_OFF)


def _asks(code: types.CodeType) -> bool:
    uses = uses_of(code)
    mentioned = uses.names | uses.set
    return uses.is_computed or not (_ASKING.isdisjoint(mentioned) and _SWITCHING.isdisjoint(mentioned))
