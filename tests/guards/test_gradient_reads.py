"""Which static tensors require a gradient, without gradient mode: compared where something can depend on it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE

ASKS = operator.attrgetter("requires_grad")
NAMES = ["requires", "grad"]


class Layer(nn.Module):
    """One weight, and a body that is given to it."""

    def __init__(self, body: Callable[[Layer, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, device=DEVICE))
        self.bias = nn.Parameter(torch.randn(4, device=DEVICE))
        self.body = body

    @override
    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Asking(torch.autograd.Function):
    """Its ``ctx`` tells, without gradient mode, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:  # type: ignore[explicit-override]
        return x @ weight if ctx.needs_input_grad[1] else x - 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[explicit-override]
        return grads[0], None


@torch.enable_grad()
def with_gradients(layer: Layer, x: Tensor) -> Tensor:
    """A decorator switches the mode on."""
    return x @ layer.weight


def _with(mode: Callable[[], Any]) -> Callable[[Layer, Tensor], Tensor]:
    def body(layer: Layer, x: Tensor) -> Tensor:
        with mode():
            return x @ layer.weight

    return body


def _switched(layer: Layer, x: Tensor) -> Tensor:
    torch.set_grad_enabled(True)
    result = x @ layer.weight
    torch.set_grad_enabled(False)
    return result


def _gradient(layer: Layer, x: Tensor) -> Tensor:
    with torch.enable_grad():
        loss = (x @ layer.weight).sum() + layer.bias.sum()
        try:
            return torch.autograd.grad(loss, layer.bias)[0]
        except RuntimeError:
            return x


BODIES: dict[str, Callable[[Layer, Tensor], Any]] = {
    "requires_grad": lambda layer, x: x @ layer.weight if layer.weight.requires_grad else x - 1,
    "is_leaf and grad_fn": lambda layer, x: (x * 2, layer.weight.is_leaf, (layer.weight * 1).grad_fn is None),
    "getattr": lambda layer, x: x * 2 if getattr(layer.weight, "_".join(NAMES)) else x * 3,
    "attrgetter": lambda layer, x: x * 2 if ASKS(layer.weight) else x * 3,
    "any": lambda layer, x: x * 2 if any(p.requires_grad for p in layer.parameters()) else x * 3,
    "a function of autograd": lambda layer, x: Asking.apply(x, layer.weight),  # type: ignore[no-untyped-call]
    "enable_grad": _with(torch.enable_grad),
    "set_grad_enabled": _with(lambda: torch.set_grad_enabled(True)),
    "inference_mode": _with(lambda: torch.inference_mode(False)),
    "switched": _switched,
    "decorated": with_gradients,
    "gradient": _gradient,
    "copied": lambda layer, x: (x * 2, copy.deepcopy(layer.weight)),
    "a parameter of it": lambda layer, x: (x * 2, nn.Parameter(layer.weight.detach(), layer.weight.requires_grad)),
}


def _plain(layer: Layer, x: Tensor) -> Tensor:
    return torch.relu(nn.functional.linear(x, layer.weight, layer.bias))


def _same(results: Any, expected: Any) -> None:
    ours, theirs = (one if isinstance(one, tuple) else (one,) for one in (results, expected))
    for got, wanted in zip(ours, theirs, strict=True):
        if isinstance(wanted, Tensor):
            assert torch.equal(got, wanted)
            assert got.requires_grad is wanted.requires_grad
        else:
            assert got == wanted


def _goes_as_eager(forward: Callable[[Tensor], Any], layer: Layer) -> None:
    x = torch.randn(2, 4, device=DEVICE)
    _same(forward(x), layer.body(layer, x))


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG")
@pytest.mark.parametrize("name", BODIES)
def test_code_that_can_tell_is_seen(name: str) -> None:
    layer = Layer(BODIES[name])
    forward = capture(layer.forward)
    with torch.no_grad():
        for number in range(16):
            if number % 4 == 3:
                layer.weight.requires_grad_(not layer.weight.requires_grad)
            if number == 9:
                layer.bias.requires_grad = False
            _goes_as_eager(forward, layer)
            assert not torch.is_grad_enabled()


def test_nothing_depends_on_it_without_gradients() -> None:
    layer = Layer(_plain)
    forward = capture(layer.forward)
    with torch.no_grad():
        for number in range(8):
            if number > 2:
                layer.requires_grad_(number % 2 == 0)
            _goes_as_eager(forward, layer)
    assert recordings(forward).recordings == 1
    assert recordings(forward).replays >= 5


@pytest.mark.parametrize("first", [True, False])
def test_a_recording_with_gradients_beside_one_without(first: bool) -> None:
    """The guards of one serve the other: what one need not ask, the other has to."""
    layer = Layer(_plain)
    forward = capture(layer.forward)
    for number in range(24):
        if number in (12, 16, 20):
            layer.requires_grad_(number == 16)
        for enabled in (first, not first):
            with torch.set_grad_enabled(enabled):
                _goes_as_eager(forward, layer)


def test_a_moved_weight_that_requires_none_is_patched() -> None:
    layer = Layer(_plain)
    forward = capture(layer.forward)
    with torch.no_grad():
        for number in range(10):
            if number > 3:
                layer.weight = nn.Parameter(torch.randn(4, 4, device=DEVICE), requires_grad=number % 2 == 0)
            _goes_as_eager(forward, layer)
