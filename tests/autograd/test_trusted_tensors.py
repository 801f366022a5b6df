"""Tensors that fast paths do not compare again: aliases that replays keep to themselves, and static arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from capture import capture, mark_step_begin, recordings
from capture.torch_private import capabilities
from tests.support.device import DEVICE

SETTLED = 6  # calls after which a fast path has noted what it trusts


def _cached(scale: Tensor, cache: Tensor, other: Tensor) -> Tensor:
    return (cache * scale + other).sum(-1)


def _cast(cache: Tensor) -> Tensor:
    return cache.to(torch.float64)


def _transposed(cache: Tensor) -> Tensor:
    cache.data = cache.data.t()  # the same object, at the same address
    return cache


def _fewer(cache: Tensor) -> Tensor:
    cache.data = cache.data[:2]
    return cache


def _with_gradient(cache: Tensor) -> Tensor:
    return cache.requires_grad_()


def _as_double(cache: Tensor) -> Tensor:
    cache.data = cache.data.double()
    return cache


def _other_object(cache: Tensor) -> Tensor:
    return cache.detach()


def _other_memory(cache: Tensor) -> Tensor:
    return cache.clone() + 1


def _written(cache: Tensor) -> Tensor:
    return cache.mul_(3)


CHANGES = [_cast, _transposed, _fewer, _with_gradient, _as_double, _other_object, _other_memory, _written]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keeps_object", [True, False])
def test_a_static_argument_changes(change: Callable[[Tensor], Tensor], keeps_object: bool) -> None:
    captured = capture(_cached, static=["cache", "other"])
    torch.manual_seed(0)
    cache, other = torch.randn(4, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    for number in range(2 * SETTLED):
        if number == SETTLED:
            cache = change(cache if keeps_object else cache.detach().clone())
        if number > SETTLED:
            cache.data.add_(1)
        scale = torch.full((), float(number), device=DEVICE)
        result, expected = captured(scale, cache, other), _cached(scale, cache, other)
        assert result.dtype == expected.dtype
        assert result.requires_grad == expected.requires_grad
        assert torch.equal(result, expected), number


def test_a_static_argument_is_another_object_in_every_call() -> None:
    captured = capture(_cached, static=["cache"])
    cache, other = torch.randn(4, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    for number in range(40):
        cache = cache.detach()
        scale = torch.full((), float(number), device=DEVICE)
        assert torch.equal(captured(scale, cache, other), _cached(scale, cache, other))
    assert recordings(captured).recordings == 1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def _square(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.data.double()


def _frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def _moved(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.data.clone() * 2


def _strided(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.t().contiguous().t()


def _nothing(model: nn.Module) -> None:
    del model


@pytest.mark.parametrize("gradients", ["autograd", "accumulate"])
@pytest.mark.parametrize("between", [_nothing, _square, _frozen, _moved, _strided])
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_blocks_train_as_eager(gradients: str, between: Callable[[nn.Module], None], keeps_graph: bool) -> None:
    """Also where a pass keeps its graph and runs twice, which leaves what is kept apart to others for a while."""
    torch.manual_seed(0)
    eager = nn.Sequential(_Block(), _Block()).to(DEVICE)
    ours = copy.deepcopy(eager)
    for block in ours:
        capture(block, gradients=gradients)  # type: ignore[call-overload]
    kept: list[list[Tensor]] = [[], []]
    for number in range(3 * SETTLED):
        torch.manual_seed(number)
        x = torch.randn(3, 8, device=DEVICE)
        for model, gradients_kept in zip((eager, ours), kept, strict=True):
            mark_step_begin()
            if number == SETTLED:
                between(model)
            given = x.to(next(model.parameters()).dtype).requires_grad_()
            loss = model(given).square().sum()
            loss.backward(retain_graph=keeps_graph and number % 5 == 0)
            if keeps_graph and number % 5 == 0:
                loss.backward()
            assert given.grad is not None
            gradients_kept.append(given.grad)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.grad is not None:
                        gradients_kept += [weight.grad] if number % 7 == 0 else [weight.grad.clone()]
                        weight.sub_(0.01 * weight.grad)
                        weight.grad = None
        assert all(map(torch.equal, *kept)), number
    assert all(recordings(block).replays > SETTLED for block in ours)


def test_what_is_compared_once_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch compares the metadata of one tensor a pass, in place of all that the backward pass takes."""
    numbers: list[int] = []
    original = capabilities.metadata_guard

    def noted(tensors: list[Tensor], free: tuple[int, ...] = ()) -> Callable[..., bool]:
        numbers.append(len(tensors))
        return original(tensors, free)

    monkeypatch.setattr(capabilities, "metadata_guard", noted)
    block = capture(_Block().to(DEVICE))
    for _ in range(3 * SETTLED):
        mark_step_begin()
        x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
        block(x).sum().backward()
        block.zero_grad()
    assert max(numbers) >= 5
    assert numbers[-1] <= 3  # the comparison of the others, made last: the input and the gradient
