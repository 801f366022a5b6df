"""Numbers that change in each call are set in the parameters of kernels: one recording, bit for bit as eager."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capture import capture, config, recordings
from capture.engines.cuda.engine import CudaBackend
from tests.gpu.moving import spoil
from tests.gpu.support import DEVICE, ON_CUDA, needs_gpu, rand, same

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore::UserWarning:torch")]
PLAIN = [0.1, 0.12, 0.3, 0.07, 3.7, -0.2, 0.999, 2.5, -1.5, 0.11, 0.1, 0.3, 1e-3, 0.77]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, math.inf, math.nan, 1e-40, 1e30, 1e-30, 7.0]


@pytest.fixture(autouse=True)
def _lifts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(CudaBackend, "lifts_numbers", True)
    with config.patch(poison=False):  # poisoned memory makes calls take the general way
        yield


def is_lifted(f: Any) -> bool:
    return any("one recording serves" in one.detail for one in recordings(f).events)


def reasons(f: Any) -> list[str]:
    return [one.detail for one in recordings(f).events if "numbers" in one.detail]


def beside(f: Any, body: Callable[..., Any], numbers: list[Any], dtype: torch.dtype = torch.float32) -> None:
    for seed, number in enumerate(numbers):
        x = rand(33, 7, seed=seed).to(dtype)
        same(f(x, number), body(x, number))


BODIES: dict[str, Callable[[Tensor, float], Any]] = {
    "mul": lambda x, s: torch.relu(x) * s,
    "sub": lambda x, s: (s - x) - s,
    "div": lambda x, s: torch.relu(x) / s,
    "alpha": lambda x, s: x.add(torch.relu(x), alpha=s).sub(x, alpha=s),
    "in place": lambda x, s: torch.relu(x).mul_(s).add_(x, alpha=s),
    "lerp": lambda x, s: torch.lerp(torch.relu(x), x, s),
    "pow": lambda x, s: x.abs().add(1) ** s,
    "clamp": lambda x, s: torch.relu(x).clamp(max=s),
    "addcmul": lambda x, s: x.addcmul(torch.relu(x), x, value=s),
    "leaky": lambda x, s: functional.leaky_relu(x + 1, s),
    "compare": lambda x, s: (x + 1 > s) * 2,
    "fill": lambda x, s: torch.empty_like(x).fill_(s) + x,
    "foreach": lambda x, s: torch._foreach_add(torch._foreach_mul([x, x + 1], s), [x, x], alpha=s),
    "broadcast": lambda x, s: (x.unsqueeze(-1) + x.unsqueeze(-2)) * s,
    "temperature": lambda x, s: torch.softmax(x / s, -1),
    "twice": lambda x, s: torch.relu(x) * s + torch.tanh(x) / s,
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_of_all_kinds(name: str, dtype: torch.dtype) -> None:
    f = capture(BODIES[name], max_recordings=40)
    beside(f, BODIES[name], [*PLAIN[:4], *SPECIAL, *PLAIN, *SPECIAL, *PLAIN], dtype)
    assert is_lifted(f), reasons(f)
    assert recordings(f).recordings <= 2 + len(SPECIAL) + 4


def test_what_is_computed_or_rounded_stays_in_the_key() -> None:
    """But for numbers that the body only compares besides: it is asked again before each replay."""
    bodies: list[Callable[[Tensor, float], Any]] = [
        lambda x, s: (x * 10).to(torch.int32).fill_(s) + x,
        lambda x, s: x * (1 if s > 0.3 else s),
        lambda x, s: x + torch.arange(0.0, 1.0, s).sum(),
    ]
    for body in bodies:
        f = capture(body, max_recordings=40)
        beside(f, body, [abs(number) for number in PLAIN])
        assert is_lifted(f) == (body is bodies[1] or (body is bodies[0] and not ON_CUDA))  # a tape gives it as it is


def test_weights_move_while_a_number_changes() -> None:
    ours, theirs = (nn.Linear(7, 7, device=DEVICE) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    f = capture(lambda x, s: ours(x) * s)
    for call in range(40):
        if call % 6 == 5:
            for weight, twin_weight in zip(ours.parameters(), theirs.parameters(), strict=True):
                before, fresh = weight.data, rand(*twin_weight.shape, seed=100 + call)
                weight.data, twin_weight.data = fresh.clone(), fresh.clone()
                spoil(before)
        x = rand(16, 7, seed=call)
        same(f(x, 0.1 + 0.017 * call), theirs(x) * (0.1 + 0.017 * call))
    assert is_lifted(f), reasons(f)


def test_bound_arguments() -> None:
    body: Callable[[Tensor, float], Tensor] = lambda x, s: torch.relu(x) * s + x  # noqa: E731
    f, kept = capture(body, inputs="bind"), []
    for call in range(30):
        kept += [torch.empty(1 + call % 7 * 512, device=DEVICE), rand(64, 64, seed=call).clone()]
        expected = body(kept[-1], 0.1 + 0.017 * call)
        same(f(kept[-1], 0.1 + 0.017 * call), expected)
        spoil(kept[-1])


def test_an_order_by_data_and_results_that_are_kept() -> None:
    def body(x: Tensor, s: float) -> Tensor:
        branches = [torch.tanh((x + number) * s) for number in range(6)]
        return torch.stack(branches).sum(0) / s

    f, kept = capture(body, schedule="auto"), []
    for call in range(160):
        x, s = rand(33, 7, seed=call), 0.1 + 0.013 * call
        ours = f(x, s)
        same(ours, body(x, s))
        if call % 3 == 0:
            kept.append((ours, body(x, s)))
    for ours, expected in kept:
        same(ours, expected)
    assert is_lifted(f), reasons(f)
