"""Blocks under ``torch.utils.checkpoint`` without reentry, which put hooks on what autograd saves in them.

torch has no switch for them but the hooks' class, and says how a block draws in a closure alone. Fallback where either
is not found: such a block is one with hooks of unknown kind, and the function around it runs eagerly.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from capture.torch_private.monkeypatch import replaced


def _hook_class() -> Any:
    """None where nobody imported it, or where it is another."""
    return getattr(sys.modules.get("torch.utils.checkpoint"), "_checkpoint_hook", None)


def _in_closure(function: Any, name: str) -> Any:
    names, cells = function.__code__.co_freevars, function.__closure__
    return cells[names.index(name)].cell_contents


def is_checkpoint(hooks: Any) -> bool:
    """These hooks are those of a block that the backward pass runs again, with the same draws."""
    if type(hooks) is not _hook_class():
        return False
    try:
        frame = _in_closure(hooks.pack_hook, "frame")
        return _in_closure(frame.recompute_fn, "preserve_rng_state") is True
    except (AttributeError, ValueError, TypeError):
        return False


@contextmanager
def without_recomputing() -> Iterator[None]:
    """In the block what checkpoints in this thread save stays with whose hooks are there already."""
    kind, thread = _hook_class(), threading.get_ident()
    if kind is None:
        yield
        return
    enter, leave, passed = kind.__enter__, kind.__exit__, set[int]()

    def begin(hooks: Any) -> None:
        if threading.get_ident() == thread and is_checkpoint(hooks):
            passed.add(id(hooks))
        else:
            enter(hooks)

    def end(hooks: Any, *error: Any) -> None:
        if id(hooks) in passed:
            passed.discard(id(hooks))
        else:
            leave(hooks, *error)

    with replaced(kind, {"__enter__": begin, "__exit__": end}):
        yield
