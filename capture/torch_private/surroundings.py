"""What a watched or recorded run changes around itself, in its thread and in torch's modules, and how all of it is put
back.

Each change has a ``with`` of its own that ends it. A signal may interrupt a ``with`` between its begin and its first
line, so that nothing ends it; then the state noted before the first change is put back as a whole. Doing that twice is
the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from capture.core.interrupts import let_through
from capture.torch_private import capabilities, monkeypatch, operator_watch

_modes: Any = sys.modules.get("torch.utils._python_dispatch")
_FLAGS = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_modes, name)
)  # fmt: skip
_set_flag = getattr(_modes, "set_is_in_mode_without_ignore_compile_internals", None)
_pop = getattr(torch._C, "_pop_torch_dispatch_stack", None)
_LIBRARY = __name__.partition(".")[0]


class Surroundings:
    """The surroundings as they are now."""

    __slots__ = ("_cache", "_flags", "_grad", "_inference", "_modes", "_replaced", "_watch")

    def __init__(self) -> None:
        self._replaced = monkeypatch.num_replaced()
        self._modes = capabilities.dispatch_mode_depth()
        self._watch = operator_watch.state()
        self._flags = tuple([getattr(_modes, name) for name in _FLAGS])
        self._cache = torch.is_autocast_cache_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()

    def note_grad_mode(self) -> None:
        """The body is over: the grad mode that it left is to stay."""
        self._grad = torch.is_grad_enabled()

    def note_autocast_cache(self) -> None:
        """Note autocast's cache as it is now, once the body's own cache is gone: it is to stay."""
        self._cache = torch.is_autocast_cache_enabled()

    def put_back(self, error: BaseException | None = None) -> None:
        """``error``: what ended the run; blocks that it left open hang on its frames."""
        monkeypatch.put_back(self._replaced)
        operator_watch.put_state(self._watch)
        while _pop is not None and capabilities.dispatch_mode_depth() > self._modes:
            _pop(None)  # by whatever key; torch 2.13 takes nothing for no argument at all
        if tuple([getattr(_modes, name) for name in _FLAGS]) != self._flags:
            for name, flag in zip(_FLAGS, self._flags, strict=True):
                setattr(_modes, name, flag)
            if _set_flag is not None and len(_FLAGS) == 3:
                _set_flag(self._flags[-1])
        if error is not None and torch.is_inference_mode_enabled() != self._inference:
            _end_blocks(error)
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
        if torch.is_autocast_cache_enabled() != self._cache:
            torch.set_autocast_cache_enabled(self._cache)


def _end_blocks(error: BaseException) -> None:
    """What a frame holds for a ``with`` ends with the frame."""
    at = error.__traceback__
    while at is not None:
        if str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == _LIBRARY:
            try:
                at.tb_frame.clear()
            except RuntimeError as error:  # the frame is still running
                let_through(error)
        at = at.tb_next
