"""A ``backward`` of a user's that reads objects which ``forward`` put on ``ctx``, or that is one of an operator:
changes and writes, with forward and backward recorded apart and in whole steps."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import frozen
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE

Apply = Callable[[torch.Tensor], torch.Tensor]


@frozen
class Made:
    """What one run of a program uses."""

    apply: Apply
    change: Callable[[], object]
    state: Callable[[], object] = lambda: None


def _function(backward: Callable[[Any, torch.Tensor], torch.Tensor], **kept: Any) -> Apply:
    class Own(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            for name, value in kept.items():
                setattr(ctx, name, value)
            return x * 2

    Own.backward = staticmethod(backward)  # type: ignore[method-assign,assignment]
    apply: Apply = Own.apply
    return lambda x: apply(x)


def function_in_an_object() -> Made:
    settings = types.SimpleNamespace(scale=lambda grad: grad * 2)
    return Made(
        _function(lambda ctx, grad: ctx.settings.scale(grad), settings=settings),
        lambda: setattr(settings, "scale", lambda grad: grad * 9),
    )


def number_in_nested_objects() -> Made:
    settings = types.SimpleNamespace(inner=[types.SimpleNamespace(factor=2.0)])
    return Made(
        _function(lambda ctx, grad: grad * ctx.settings.inner[0].factor, settings=settings),
        lambda: setattr(settings.inner[0], "factor", 9.0),
    )


def method_of_an_object() -> Made:
    class Scale:
        factor = 2.0

        def of(self, grad: torch.Tensor) -> torch.Tensor:
            return grad * self.factor

    scale = Scale()
    return Made(_function(lambda ctx, grad: ctx.by(grad), by=scale.of), lambda: setattr(scale, "factor", 9.0))


def list_that_grows_in_backward() -> Made:
    seen = list[int]()

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.seen.append(1)
        return grad * 3

    return Made(_function(backward, seen=seen), seen.clear, lambda: list(seen))


def gradient_of_an_operator() -> Made:
    @torch.library.custom_op("capture_tests_ctx::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)
    return Made(lambda x: twice(x), lambda: twice.register_autograd(lambda ctx, grad: grad * 9))


def _run(make: Callable[[], Made], wrap: Any, *, is_step: bool) -> tuple[list[Any], Any]:
    made = make()
    weight: Any = torch.ones(3, device=DEVICE, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return made.apply(x * weight)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = region(x).sum()
        loss.backward()
        return loss.detach()

    call, values = wrap(step if is_step else region), list[Any]()
    for number in range(12):
        if number == 6:
            made.change()
        weight.grad = None
        result = call(torch.full((3,), float(number), device=DEVICE))
        if not is_step:
            result.sum().backward()
        values.append((result.tolist(), weight.grad.tolist(), made.state()))
    return values, call


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG:capture.CaptureWarning")
@pytest.mark.parametrize("is_step", [False, True], ids=["apart", "step"])
@pytest.mark.parametrize("make", [
    function_in_an_object, number_in_nested_objects, method_of_an_object, list_that_grows_in_backward,
    gradient_of_an_operator,
])  # fmt: skip
def test_what_backward_reads_and_writes(make: Callable[[], Made], is_step: bool) -> None:
    wanted, _ = _run(make, lambda function: function, is_step=is_step)
    got, captured = _run(make, capture, is_step=is_step)
    assert got == wanted
    if make is not list_that_grows_in_backward:
        assert recordings(captured).replays >= 4
