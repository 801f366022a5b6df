"""How long autograd takes for the backward pass of a call that ran eagerly.

It is measured from outside: from the first gradient of one of its results to the last gradient of one of its inputs.
Work for other parts of the graph in between is included. Where ``torch.autograd.grad`` asks for gradients of the inputs
themselves, no node of theirs runs, and the end is that of the whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from capture.torch_private.autograd import add_prehook, at_end_of_pass


class BackwardTimer:
    """Measures one call. ``clock``: gives seconds."""

    def __init__(
        self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._begin: float | None = None
        self._end: float | None = None
        first = [add_prehook(result.grad_fn, self._note_begin) for result in results if result.grad_fn is not None]
        last = [
            add_prehook(get_gradient_edge(input_).node, self._note_end) for input_ in inputs if input_.requires_grad
        ]
        self._handles: list[Any] = [*first, *last]

    def _note_begin(self, _: Any) -> None:
        if self._begin is None:
            at_end_of_pass(self._note_whole)
            self._begin = self._clock()

    def _note_whole(self) -> None:
        if self._end is None:
            self._end = self._clock()

    def _note_end(self, _: Any) -> None:
        if self._begin is not None:
            self._end = self._clock()

    @property
    def is_blind(self) -> bool:
        """Whether a backward pass began, but its end was not seen, as where an error ended it."""
        return self._begin is not None and self._end is None

    def stop(self) -> float | None:
        """Stop measuring. Gives the seconds that the backward pass took; None if none was seen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return None if self._begin is None or self._end is None else self._end - self._begin
