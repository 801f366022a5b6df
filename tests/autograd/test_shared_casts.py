"""Several calls in one autocast block of the caller: a weight is cast once for all of them, so their gradients are
added in the low precision."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from capture import capture, recordings
from tests.support.device import DEVICE

_KIND = torch.device(DEVICE).type
Step = Callable[[int], torch.Tensor]
Made = tuple[nn.Module, Step]


def _block(*, enabled: bool = True) -> torch.autocast:
    return torch.autocast(_KIND, torch.bfloat16, enabled=enabled)


def _inputs(number: int) -> torch.Tensor:
    return torch.linspace(-1, number + 1.0, 16, device=DEVICE).reshape(2, 8)


def _linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, 8, device=DEVICE)


def two_calls(wrap: Any) -> Made:
    linear = _linear()
    call = wrap(lambda x: linear(x))

    def step(number: int) -> torch.Tensor:
        with _block():
            one, other = call(_inputs(number)), call(_inputs(number + 1))
        return torch.add(one.float().sum(), other.float().pow(2).sum())

    return linear, step


def micro_batches(wrap: Any) -> Made:
    net = nn.Sequential(_linear(), nn.GELU(), _linear(1))
    call = wrap(lambda x: net(x))

    def step(number: int) -> torch.Tensor:
        with _block():
            return torch.stack([call(_inputs(number + at)).float().pow(2).sum() for at in range(3)]).sum()

    return net, step


def around_a_block_without(wrap: Any) -> Made:
    linear = _linear()
    call = wrap(lambda x: linear(x))

    def step(number: int) -> torch.Tensor:
        with _block():
            one = call(_inputs(number))
            with _block(enabled=False):
                two = call(_inputs(number))
            three = call(_inputs(number + 2))
        return torch.add(one.float().sum() + two.sum(), three.float().pow(2).sum())

    return linear, step


def a_recurrence(wrap: Any) -> Made:
    torch.manual_seed(0)
    cell = nn.RNNCell(8, 8, device=DEVICE)
    call = wrap(lambda x, h: cell(x, h))

    def step(number: int) -> torch.Tensor:
        hidden = torch.zeros(2, 8, device=DEVICE)
        with _block():
            for at in range(4):
                hidden = call(_inputs(number + at) * 0.1, hidden)
        return torch.sum(hidden.float().pow(2))

    return cell, step


def of_two_functions(wrap: Any) -> Made:
    linear, outer_linear = _linear(), _linear(1)
    first, second = wrap(lambda x: linear(x)), wrap(lambda x: torch.tanh(linear(outer_linear(x))))

    def step(number: int) -> torch.Tensor:
        with _block():
            made = first(second(first(_inputs(number)))).float() + second(_inputs(number)).float()
        return torch.sum(made.pow(2))

    return nn.ModuleList([linear, outer_linear]), step


def sometimes_alone(wrap: Any) -> Made:
    """One call in each autocast block for some steps, then two."""
    linear = _linear()
    call = wrap(lambda x: linear(x))

    def step(number: int) -> torch.Tensor:
        with _block():
            one = call(_inputs(number))
            other = call(_inputs(number + 1)) if number >= 4 else one
        return torch.add(one.float().sum(), other.float().pow(2).sum())

    return linear, step


def _gradients(make: Callable[[Any], Made], wrap: Any, steps: int = 9) -> list[list[float]]:
    net, step = make(wrap)
    values = []
    for number in range(steps):
        net.zero_grad()
        loss = step(number)
        loss.backward()
        grads = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
        values.append([float(loss.detach()), *torch.cat([grad.flatten() for grad in grads]).tolist()])
    return values


_CASES = [
    (two_calls, 0),
    (micro_batches, 0),
    (around_a_block_without, 0),
    (a_recurrence, 1),  # the first watched run of a key after another call casts for itself
    (of_two_functions, 1),
    (sometimes_alone, 5),  # the step that first has two calls, and shows it, is over by then
]


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:CG501")
@pytest.mark.parametrize(("make", "first"), _CASES, ids=[make.__name__ for make, _ in _CASES])
def test_gradients_add_up_as_eagerly(make: Callable[[Any], Made], first: int) -> None:
    made: list[Any] = []

    def wrap(body: Any) -> Any:
        made.append(capture(body))
        return made[-1]

    wanted, got = _gradients(make, lambda body: body), _gradients(make, wrap)
    assert got[first:] == wanted[first:]
    assert sum(recordings(function).replays for function in made) >= 4


def _weight_of_a_few_steps() -> Callable[[], object]:
    net, step = two_calls(capture)
    for number in range(4):
        step(number).backward()
    return weakref.ref(next(net.parameters()))


def test_nothing_is_kept_when_the_block_is_over() -> None:
    weight = _weight_of_a_few_steps()
    gc.collect()
    assert weight() is None
