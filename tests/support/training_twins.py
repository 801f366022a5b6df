"""Training steps beside an eager twin: results and all state are compared after each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from capture import capture
from tests.support.device import DEVICE

CALLS = 40


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(name, bits(one)) for name, one in value.items()]
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else repr(value)


def both(
    make: Callable[[Callable[[Any], Any]], tuple[Callable[..., Any], Callable[[], Any]]],
    arguments: Callable[[int], tuple[Any, ...]], **options: Any,
) -> Any:  # fmt: skip
    """The program eagerly and captured; what each call gives and leaves is equal. Gives the captured function."""
    made: list[Any] = []

    def wrap(function: Any) -> Any:
        made.append(capture(function, **options))
        return made[-1]

    (eager, eager_state), (mine, my_state) = make(lambda function: function), make(wrap)
    for number in range(CALLS):
        results = []
        for run, state in ((eager, eager_state), (mine, my_state)):
            torch.manual_seed(number)
            try:
                result = run(*arguments(number))
            except ArithmeticError as error:
                result = repr(error)
            results.append((bits(result), bits(state()), bits(torch.get_rng_state())))
        assert results[0] == results[1], number
    return made[0]


def data(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator("cpu").manual_seed(number), device="cpu").to(DEVICE)
