"""Methods of a user's ``autograd.Function`` that are replaced, and detection of anomalies, around regions and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from typing_extensions import override

from capture import capture, recordings
from tests.support.device import DEVICE


def _classes() -> tuple[Any, Any]:
    """A subclass of ``autograd.Function`` and the class that it inherits ``backward`` from."""

    class Base(torch.autograd.Function):
        @staticmethod
        @override
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    class Double(Base):
        @staticmethod
        @override
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return Double, Base


_METHODS: dict[str, Callable[[Any, Any], None]] = {
    "backward": lambda own, base: setattr(own, "backward", staticmethod(lambda ctx, grad: grad * 3)),
    "inherited": lambda own, base: setattr(base, "backward", staticmethod(lambda ctx, grad: grad * 5)),
    "forward": lambda own, base: setattr(own, "forward", staticmethod(lambda ctx, x: x * 7)),
}


def _gradient(weight: torch.Tensor) -> list[float]:
    assert weight.grad is not None
    return list(weight.grad.flatten().tolist())


def _gradients(body: Callable[[Any, torch.Tensor], torch.Tensor], change: str, wrap: Any) -> tuple[list[float], Any]:
    own, base = _classes()
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    call = wrap(lambda x: body(own, x * weight))
    values: list[float] = []
    for number in range(10):
        if number == 5:
            _METHODS[change](own, base)
        weight.grad = None
        result = call(torch.full((3,), float(number), device=DEVICE))
        if result.requires_grad:
            result.sum().backward()
        values += [float(result.sum().detach()), *_gradient(weight)]
    return values, call


def region(own: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = own.apply(x)
    return made


def step(own: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = own.apply(x).sum()
    loss.backward()
    return loss.detach()


def test_forward_is_replaced_behind_a_name() -> None:
    """``square = Square.apply`` is how a function is written down."""

    def values(wrap: Any) -> list[float]:
        own, _ = _classes()
        double = own.apply
        call = wrap(lambda x: double(x).sin())
        given = []
        for number in range(10):
            if number == 5:
                _METHODS["forward"](own, None)
            x = torch.full((3,), float(number), device=DEVICE, requires_grad=True)
            result = call(x)
            result.sum().backward()
            given += [*result.tolist(), *_gradient(x)]
        return given

    assert values(capture) == values(lambda function: function)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("change", sorted(_METHODS))
@pytest.mark.parametrize("body", [region, step])
def test_a_method_is_replaced(body: Callable[[Any, torch.Tensor], torch.Tensor], change: str) -> None:
    wanted, _ = _gradients(body, change, lambda f: f)
    got, captured = _gradients(body, change, capture)
    assert got == wanted
    assert recordings(captured).replays >= 2


def _hidden_nan(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1e6, (weight * x).sqrt(), torch.zeros_like(x)) + weight

    return body


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("around", ["all", "forward", "backward"])
def test_detection_of_anomalies(around: str) -> None:
    """With anomaly detection eager raises at the first node that gives NaN, also where a later node would hide it."""

    def run(wrap: Any) -> list[str]:
        weight = torch.zeros(3, device=DEVICE, requires_grad=True)
        call, said = wrap(_hidden_nan(weight)), []
        for number in range(8):
            looks = number % 3 == 2
            try:
                with torch.autograd.set_detect_anomaly(looks and around != "backward"):
                    result = call(torch.full((3,), 1.0 + number, device=DEVICE))
                with torch.autograd.set_detect_anomaly(looks and around != "forward"):
                    result.sum().backward()
                said.append("passed")
            except RuntimeError as error:
                said.append(str(error))
        return said

    assert run(capture) == run(lambda f: f)


@pytest.mark.filterwarnings("ignore")
def test_detection_of_anomalies_around_a_step() -> None:
    def run(wrap: Any) -> list[str]:
        weight = torch.zeros(3, device=DEVICE, requires_grad=True)
        body, said = _hidden_nan(weight), []

        def whole(x: torch.Tensor) -> torch.Tensor:
            loss = body(x).sum()
            loss.backward()
            return loss.detach()

        call = wrap(whole)
        for number in range(8):
            with torch.autograd.set_detect_anomaly(number % 3 == 2):
                try:
                    said.append(str(float(call(torch.full((3,), 1.0 + number, device=DEVICE)))))
                except RuntimeError as error:
                    said.append(str(error))
        return said

    assert run(capture) == run(lambda f: f)


def test_autocasts_cache_is_part_of_the_key() -> None:
    def run(wrap: Any) -> list[list[float]]:
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 8, device=DEVICE)
        call, gradients = wrap(lambda x: linear(linear(x))), []
        for number in range(9):
            linear.zero_grad()
            x = torch.linspace(-1, number + 1.0, 16, device=DEVICE).reshape(2, 8)
            with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, cache_enabled=number % 3 > 0):
                result = call(x)
            result.float().pow(2).sum().backward()
            gradients.append(_gradient(linear.weight))
        return gradients

    assert run(capture) == run(lambda f: f)
