"""Attributes that the caller's code puts on tensors which it gives as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from capture import capture, recordings
from tests.support.device import DEVICE

Body = Callable[[Any], torch.Tensor]


def _factor_of(tensor: Any, default: float) -> float:
    return float(getattr(tensor, "factor", default))


def by_getattr(x: Any) -> torch.Tensor:
    return torch.mul(x, getattr(x, "factor", 1.0))


def by_hasattr(x: Any) -> torch.Tensor:
    return torch.mul(x, 3.0) if hasattr(x, "factor") else torch.mul(x, 1.0)


def by_an_error(x: Any) -> torch.Tensor:
    try:
        return torch.mul(x, x.factor)
    except AttributeError:
        return torch.mul(x, 1.0)


def in_a_helper(x: Any) -> torch.Tensor:
    return torch.mul(x, _factor_of(x, 1.0))


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _given(number: int, **attributes: Any) -> torch.Tensor:
    made = torch.full((3,), float(number), device=DEVICE)
    made.__dict__.update(attributes)
    return made


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CG110")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("body", [by_getattr, by_hasattr, by_an_error, in_a_helper])
def test_an_attribute_that_only_some_arguments_have(body: Body, needs_grad: bool) -> None:
    captured = capture(body)
    for number in range(10):
        attributes = {"factor": 2.0} if number in (5, 7) else {}
        x, y = (_given(number, **attributes).requires_grad_(needs_grad) for _ in range(2))
        expected, result = body(x), captured(y)
        assert torch.equal(result, expected)
        if needs_grad:
            expected.sum().backward()
            result.sum().backward()
            assert torch.equal(_gradient(x), _gradient(y))
    assert recordings(captured).replays >= 4


def test_an_attribute_that_nobody_reads_keeps_nothing_from_replaying() -> None:
    captured = capture(lambda x: torch.mul(x, 2) + 1)
    with torch.no_grad():
        for number in range(6):
            assert torch.equal(captured(_given(number, note=number)), _given(number) * 2 + 1)
    assert recordings(captured).replays == 4


@pytest.mark.filterwarnings("ignore:CG110")
def test_an_attribute_that_a_parameter_gets_later() -> None:
    parameter: Any = torch.nn.Parameter(torch.ones(3, device=DEVICE))
    captured = capture(by_getattr)
    with torch.no_grad():
        for number in range(9):
            if number == 4:
                parameter.factor = 2.0
            if number == 7:
                del parameter.factor
            assert torch.equal(captured(parameter), by_getattr(parameter))


def test_the_error_of_an_attribute_that_is_not_there_is_torchs_own() -> None:
    def body(x: Any) -> torch.Tensor:
        return torch.mul(x, x.factor)

    captured = capture(body)
    with pytest.raises(AttributeError) as ours:
        captured(_given(1))
    with pytest.raises(AttributeError) as eager:
        body(_given(1))
    assert str(ours.value) == str(eager.value)


def by_vars(x: Any) -> torch.Tensor:
    return torch.mul(x, 1.0 + len(vars(x)))


def by_a_look_into_the_dict(x: Any) -> torch.Tensor:
    return torch.mul(x, 2.0 if "factor" in x.__dict__ else 1.0)


def by_dir(x: Any) -> torch.Tensor:
    return torch.mul(x, 2.0 if "factor" in dir(x) else 1.0)


def by_a_value_in_the_dict(x: Any) -> torch.Tensor:
    return torch.mul(x, x.__dict__.get("factor", 1.0))


@pytest.mark.filterwarnings("ignore:CG110")
@pytest.mark.parametrize("body", [by_vars, by_a_look_into_the_dict, by_dir, by_a_value_in_the_dict])
def test_a_look_into_the_dict_of_an_argument(body: Body) -> None:
    captured = capture(body)
    with torch.no_grad():
        for number in range(12):
            attributes = {"factor": float(number)} if number > 5 and number % 2 else {}
            assert torch.equal(captured(_given(number, **attributes)), body(_given(number, **attributes)))
    assert recordings(captured).replays >= 4


@pytest.mark.parametrize("needs_grad", [False, True])
def test_whether_an_argument_is_a_parameter(needs_grad: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if isinstance(x, torch.nn.Parameter) else 3.0
        return torch.mul(x, factor * len(type(x).__name__))

    captured = capture(body)
    for number in range(12):
        x = _given(number)
        if number % 2:
            x = torch.nn.Parameter(x, requires_grad=needs_grad)
        else:
            x.requires_grad_(needs_grad)
        assert torch.equal(captured(x), body(x))
    assert recordings(captured).replays >= 6


def _made(number: int) -> torch.Tensor:
    return _given(number).requires_grad_() * 1


_IN_THE_GRAPH: dict[str, tuple[Body, Callable[[torch.Tensor], object]]] = {
    "retains_grad": (lambda x: torch.mul(x, 2.0 if x.retains_grad else 3.0), lambda x: x.retain_grad()),
    "hooks": (lambda x: torch.mul(x, 2.0 if x._backward_hooks else 3.0), lambda x: x.register_hook(lambda g: g)),
}


@pytest.mark.filterwarnings("ignore:CG110")
@pytest.mark.parametrize("kind", sorted(_IN_THE_GRAPH))
def test_what_an_argument_tells_of_its_place_in_a_graph(kind: str) -> None:
    body, change = _IN_THE_GRAPH[kind]
    captured = capture(body)
    for number in range(8):
        x = _made(number)
        if number % 2:
            change(x)
        assert torch.equal(captured(x), body(x))


@pytest.mark.filterwarnings("ignore:CG110")
def test_which_output_of_its_node_an_argument_is() -> None:
    body: Body = lambda x: torch.mul(x, 1.0 + x.output_nr)  # noqa: E731
    captured = capture(body)
    for number in range(8):
        x = torch.split(torch.ones(4, device=DEVICE).requires_grad_() * number, 2)[number % 2]
        assert torch.equal(captured(x), body(x))


@pytest.mark.filterwarnings("ignore:CG")
def test_reads_and_writes_of_hooks_are_torchs_own_while_watched() -> None:
    """Properties that are watched can be set."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.requires_grad_().register_post_accumulate_grad_hook(lambda p: None)
        return y

    captured = capture(body)
    with torch.no_grad():
        for number in range(4):
            assert torch.equal(captured(_given(number)), _given(number) * 2)
