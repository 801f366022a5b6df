"""Bodies that cannot be recorded or that raise, and the check that their calls are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from capture import capture
from tests.gpu.support import (
    DEVICE,
    capturing,
    healthy,
    rand,
    rng_state,
    same,
    synchronize,
)

Body = Callable[[Tensor], Any]


class Trouble(Exception):
    """Raised by bodies under test."""


def make(trouble: Body) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function with ``trouble`` in its middle that writes its argument and its own state, and that state."""
    state = torch.zeros(4, device=DEVICE)

    def f(x: Tensor) -> Any:
        state.add_(1)
        x.mul_(2)
        noise = torch.rand_like(x)
        found = trouble(x)
        x.add_(noise)
        state.mul_(1.5)
        return found, x + state

    return f, state


def outcome(function: Callable[[Tensor], Any], state: Tensor, seed: int) -> list[Any]:
    """Result or exception of one call, then argument, state and generator after it."""
    x = rand(4, 4, seed=seed)
    torch.manual_seed(seed)
    result: Any
    try:
        result = function(x)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - compared by the tests
        result = (type(error), str(error) if isinstance(error, Trouble | KeyboardInterrupt) else None)
    after = rng_state()
    synchronize()
    return [result, x, state.clone(), after]


def as_eager(trouble: Body, calls: int = 5, before: Callable[[int], None] = lambda i: None) -> Any:
    """Check that every call of the captured function is as in eager, and that the device works after each. Gives the
    function."""
    body, state = make(trouble)
    twin, theirs = make(trouble)
    function = capture(body)
    for i in range(calls):
        before(i)
        expected = outcome(twin, theirs, i)
        same(outcome(function, state, i), expected)
        torch.rand(2, device=DEVICE)
        rng_state()
    healthy()
    return function


def only_then(action: Callable[[Tensor], Any]) -> Body:
    """An action that is done only while the current stream is captured."""

    def trouble(x: Tensor) -> Tensor:
        if capturing():
            action(x)
        return x * 3

    return trouble


def use(action: Callable[[], Any]) -> Body:
    """A body that does ``action`` between two operators."""

    def trouble(x: Tensor) -> Tensor:
        y = x + 1
        action()
        return y * 3

    return trouble


def raise_trouble(x: Tensor) -> None:
    raise Trouble("only while capturing")


def swallow(action: Callable[[], Any]) -> None:
    """Catch an error, as a library does that probes for a feature."""
    try:
        action()
    except RuntimeError:
        pass
