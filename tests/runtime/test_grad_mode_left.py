"""The grad mode that a body set before it raised is the caller's, as in eager code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capture import capture
from tests.runtime.test_failures import PHASES, x_of
from tests.runtime.test_failures import fresh as fresh
from tests.support.raising import Gate, Trigger, Trouble


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("trained", ["", "as a region", "in the body"])
@pytest.mark.parametrize("was", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_a_body_that_raises_leaves_the_grad_mode_that_it_set(
    phase: str, was: bool, trained: str, kind: type[BaseException]
) -> None:
    """Eager code that sets the mode without a ``with`` does the same."""
    weight = torch.ones(3, requires_grad=True)
    trigger = Trigger(PHASES[phase])
    gate = Gate(trigger, kind())

    def body(x: Tensor) -> Tensor:
        y = x * weight
        if trained == "in the body":
            with torch.enable_grad():
                (x * weight).sum().backward()
        torch.set_grad_enabled(not was)
        gate.check()
        torch.set_grad_enabled(was)
        return y if trained == "as a region" else y.detach()

    f = capture(body)
    for seed in range(8):
        runs = len(trigger.runs)
        trigger.begin()
        gate.error.__traceback__ = raised = None
        with torch.set_grad_enabled(was):
            try:
                f(x_of(seed)[0, :3])
            except kind as error:
                raised = error
            assert (raised is gate.error) == (len(trigger.runs) > runs and trigger.calls in trigger.fail_on)
            assert torch.is_grad_enabled() == (was if raised is None else not was), seed
