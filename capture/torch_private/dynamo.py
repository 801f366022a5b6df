"""What is asked of ``torch.compile``'s front end, once something else has loaded it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from capture.torch_private.monkeypatch import replaced

COMPILERS = ("torch._dynamo", "torch._inductor")
"""Packages whose classes count what was compiled."""
COMPILE = (
    "torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.async_compile",
    "torch.jit._builtins", "torch.jit._recursive", "torch.jit.frontend",
)  # fmt: skip
"""Modules whose functions compile: Dynamo forward passes, Inductor backward passes, too, as late as these run first,
and TorchScript what some operators of a device are made of (``gru_cell``)."""
RUN_COMPILED = ("torch._dynamo.", "torch._inductor.", "torch._functorch._aot_autograd.")
"""Beginnings of modules that, as Triton does, look after what they read of their own, which may be another object in
every call: counters, the allocator that Inductor gives to Triton. What they call counts as before: the pieces that were
compiled, and hooks. Where a torch has other names, more is guarded, and such a body is watched more often."""
AROUND_COMPILED = "torch._dynamo.external_utils"
"""The module whose function stands around each that is compiled, up to torch 2.11 at least: it is what was compiled."""
_hidden = False
_WATCHING = ("key", "state", "observe", "engines")
"""Folders whose functions run while a body is watched."""


def is_loaded() -> bool:
    """Whether something else has loaded ``torch._dynamo``."""
    return "torch._dynamo" in sys.modules


def around_compiling(begin: Callable[[Any], None], end: Callable[[Any], None]) -> Callable[[], None] | None:
    """Call these, with what torch tells of it, before and after each compilation, until the function that this gives is
    called. None where torch has no such callbacks: a look at attributes, which Dynamo would compile with the model, is
    left out then."""
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    try:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)
    except AttributeError:
        return None

    def remove() -> None:
        with contextlib.suppress(ValueError):  # all callbacks were cleared meanwhile
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)

    return remove


def graphs_compiled() -> int:
    """How many graphs Dynamo has compiled in this process. 0 where torch does not count: a run that compiled is then
    one like any other."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def hide_from_compiler() -> None:
    """Keep Dynamo, once it is loaded, from compiling what watches a compiled function run.

    Without its table of skipped files it does compile that: slower at first, the same values.
    """
    global _hidden
    if _hidden or not is_loaded():
        return
    _hidden = True
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    *others, last = _WATCHING
    with contextlib.suppress(Exception):
        with replaced(rules, {"_recompile_re": lambda: None}):  # a pattern of all files: once is enough (8 ms less)
            for name in others:
                rules.add(f"capture.{name}")
        rules.add(f"capture.{last}")
