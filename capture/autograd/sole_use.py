"""An input that one call uses several times, and nothing else at all: its gradients may come back as one sum.

Autograd adds up what comes to a tensor in the order in which it comes: where a body uses its input twice, as every
residual block does, ``(others + one) + two``. For that a call gives one gradient for each use, and autograd adds them
outside of the recording: a kernel and 15 us of host time for each block. The sum in the recording is the same only
where there are no ``others``.

So it has to be known that no other node takes gradients to the input. In a chain of captured functions it is, when the
next one begins, by two facts. Between the call that made the input, this call and the next one autograd made no other
node in this thread: their numbers follow each other. And the input, which the call before made for this one, is no
longer held by anybody but this call's node, so that nothing will be made from it. Where one of them is not known, as
for the last call of a chain, all gradients come back use by use.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from capture.torch_private.autograd import is_only_saved
from capture.torch_private.threads import others_may_run


class CallInGraph(Protocol):
    """A call that is a node of the caller's graph."""

    number: int
    """Of its node, as autograd counts those that a thread makes."""
    made_for_it: weakref.ref[torch.Tensor] | None
    """Its input, if it uses only one, several times, and the call right before made that."""
    is_sole_use: bool
    """Nothing else uses that input."""


class _Here(threading.local):
    latest: weakref.ref[CallInGraph] | None = None


_here = _Here()


def follow(call: CallInGraph, begun: int, repeated: torch.Tensor | None) -> None:
    """``call`` is in the graph of this thread's caller now. ``begun``: the number that autograd's next node had as it
    began. ``repeated``: the one input that needs gradients, if its body uses that several times."""
    before = None if _here.latest is None else _here.latest()
    _here.latest = weakref.ref(call)
    if before is None or before.number + 1 != begun:
        return
    if before.made_for_it is not None:
        before.is_sole_use = is_only_saved(before.made_for_it) and not others_may_run()
    if repeated is not None and getattr(repeated.grad_fn, "frame", None) is before:
        call.made_for_it = weakref.ref(repeated)
