"""A function that can see which arguments come by position and which by name gets them in every call as the caller
gave them, and is replayed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from capture import capture, recordings

Form = tuple[tuple[Any, ...], dict[str, Any]]


def _scaled(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


@functools.wraps(_scaled)
def _asks(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _scaled(x, *args, **kwargs) + (100 if "scale" in kwargs else 10 * len(args))


@functools.wraps(_scaled)
def _fills(*args: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs.get("scale") is None:
        kwargs["scale"] = 2.0
    return _scaled(*args, **kwargs)


@functools.wraps(_scaled)
def _takes_more(x: torch.Tensor, *args: Any, offset: float = 0.0, **kwargs: Any) -> torch.Tensor:
    return _scaled(x, *args, **kwargs) + offset


@functools.wraps(_scaled)
def _order(**kwargs: Any) -> torch.Tensor:
    return _scaled(**kwargs) + (1 if next(iter(kwargs)) == "x" else 2)


def _collects(x: torch.Tensor, /, first: float = 1.0, *rest: float, last: float = 0.0, **others: Any) -> torch.Tensor:
    found: torch.Tensor = x * first + sum(rest) + last + len(others) + others.get("x", 0)
    return found


@functools.wraps(_collects)
def _forwards(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _collects(*args, **kwargs) + 7 * len(args) + 70 * len(kwargs)


def _signed(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _scaled(*args, **kwargs) + len(args)


_signed.__signature__ = inspect.signature(_scaled)  # type: ignore[attr-defined]


@functools.singledispatch
def _dispatched(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


X = torch.arange(3.0)
_CASES: list[tuple[Any, list[Form]]] = [
    (_asks, [((X,), {}), ((X, 1.0), {}), ((X,), {"scale": 1.0}), ((X,), {"scale": 3.0})]),
    (_fills, [((X,), {}), ((X,), {"scale": 1.0}), ((X,), {"scale": None}), ((), {"x": X})]),
    (_takes_more, [((X,), {}), ((X,), {"offset": 2.0}), ((X, 3.0), {"offset": 2.0}), ((X,), {"offset": 3.0})]),
    (_order, [((), {"x": X, "scale": 2.0}), ((), {"scale": 2.0, "x": X})]),
    (_collects, [((X,), {}), ((X, 1.0, 2.0), {"last": 3.0}), ((X,), {"x": 1.0}), ((X,), {"first": 2.0, "y": 0})]),
    (_forwards, [((X,), {}), ((X, 1.0, 2.0), {"last": 3.0}), ((X,), {"first": 1.0}), ((X, 1.0), {})]),
    (_signed, [((X,), {}), ((X, 1.0), {}), ((X,), {"scale": 1.0})]),
    (functools.partial(_asks, scale=2.0), [((X,), {}), ((X,), {"scale": 1.0})]),
    (_dispatched, [((X,), {}), ((X, 2.0), {}), ((X,), {"scale": 2.0})]),
]  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("function", "forms"), _CASES, ids=range(len(_CASES)))
def test_each_form_gets_what_eager_gives(function: Callable[..., Any], forms: list[Form]) -> None:
    captured = capture(function, name="form", max_recordings=8)
    for _ in range(2):
        for args, kwargs in forms:
            for _ in range(4):
                assert torch.equal(captured(*args, **kwargs), function(*args, **kwargs))
    assert recordings(captured).recordings == len(forms)
    replays = recordings(captured).replays
    for args, kwargs in forms:
        captured(*args, **kwargs)
    assert recordings(captured).replays == replays + len(forms)


def _default(function: Any) -> Any:
    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scale") is None:
            kwargs["scale"] = 2.0
        return function(self, *args, **kwargs)

    return forward


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    @override
    @_default
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return x * scale * self.weight


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_forward_that_a_decorator_wraps(with_gradients: bool) -> None:
    eager, module = _Layer(), capture(_Layer())
    with torch.set_grad_enabled(with_gradients):
        for number in range(6):
            x = torch.full((3,), float(number))
            for kwargs in ({}, {"scale": 3.0}, {"scale": None}):
                result, expected = module(x, **kwargs), eager(x, **kwargs)
                assert torch.equal(result, expected)
                if with_gradients:
                    result.sum().backward()
                    expected.sum().backward()
                    assert str(module.weight.grad) == str(eager.weight.grad)
    assert recordings(module).replays > 6


def test_a_wrapped_function_raises_its_own_error_for_arguments_it_does_not_take() -> None:
    captured = capture(_fills, name="raises")
    for _ in range(3):
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            captured(X, other=1)


def test_a_form_seen_by_position_is_taken_straight() -> None:
    captured = capture(_asks, name="straight")
    for _ in range(3):
        captured(X, 2.0)
    runs = recordings(captured).body_runs
    for number in range(3):
        x = torch.full((3,), float(number))
        assert torch.equal(captured(x, 2.0), _asks(x, 2.0))
        assert torch.equal(captured(x), _asks(x))
    assert recordings(captured).body_runs == runs + 2  # those of the new form: watched, recorded
