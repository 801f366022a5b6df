"""Outputs whose memory is shared with other libraries or views: memory and values stay."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from capture import capture, mark_step_begin, recordings
from tests.gpu.support import DEVICE, needs_gpu, same

pytestmark = [needs_gpu]


def of(number: int, *shape: int) -> Tensor:
    return torch.full(shape or (33,), float(number + 1), device=DEVICE)


class Interface:
    """Memory given by its address alone, by ``__cuda_array_interface__``."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__)
        self.keeps = tensor


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("how", ["dlpack", "interface", "view", "tensor"])
def test_what_has_the_memory_keeps_its_values(how: str, marked: bool) -> None:
    captured = capture(lambda x: torch.relu(x) * 2 + 1)
    kept: list[Any] = []
    with torch.no_grad():
        for number in range(10):
            if marked:
                mark_step_begin()
            y = captured(of(number))
            if how == "dlpack":
                kept.append(from_dlpack(y))
            elif how == "interface":
                kept.append(Interface(y))
            else:
                kept.append(y[1:] if how == "view" else y)
            del y
            for at, holder in enumerate(kept):
                tensor = torch.as_tensor(holder, device=DEVICE) if how == "interface" else holder
                assert (tensor == (at + 1) * 2 + 1).all()
    assert recordings(captured).recordings <= 2
    assert recordings(captured).eager_calls == 0


def test_cupy_arrays_keep_their_values() -> None:
    cupy = pytest.importorskip("cupy")
    captured = capture(lambda x: x * 2)
    with torch.no_grad():
        kept = [cupy.asarray(captured(of(number))) for number in range(8)]
    torch.cuda.synchronize()
    assert [float(one[0]) for one in kept] == [2.0 * (number + 1) for number in range(8)]


def test_a_kept_output_costs_others_at_most_one_recording() -> None:
    functions = [capture(lambda x, k=k: torch.sin(x * k) + 1, name=f"f{k}") for k in range(4)]
    with torch.no_grad():
        for function in functions:
            for number in range(3):
                mark_step_begin()
                function(of(number))
        mark_step_begin()
        kept = functions[1](of(7))
        for number in range(6):
            for k, function in enumerate(functions):
                mark_step_begin()
                same(function(of(number)), torch.sin(of(number) * k) + 1)
        same(kept, torch.sin(of(7)) + 1)
    assert all(recordings(function).recordings <= 2 for function in functions)


def test_two_pins_of_two_recordings_and_a_third_beside_them() -> None:
    """Later recordings begin with a layout of the pool in which the blocks of both pinned outputs are taken."""
    first, second, third = (capture(lambda x, k=k: torch.tanh(x * k)) for k in (2, 3, 4))
    with torch.no_grad():
        for number in range(3):
            mark_step_begin()
            a = first(of(number))
            b = second(a)
            del a, b
        mark_step_begin()
        a = first(of(1))
        b = second(a)
        for number in range(5):
            mark_step_begin()
            same(third(of(number)), torch.tanh(of(number) * 4))
            c = first(of(number))
            same(second(c), torch.tanh(torch.tanh(of(number) * 2) * 3))
            del c
        same((a, b), (torch.tanh(of(1) * 2), torch.tanh(torch.tanh(of(1) * 2) * 3)))
    assert all(recordings(function).eager_calls == 0 for function in (first, second, third))


def test_training_whose_gradients_and_outputs_are_kept() -> None:
    values = []
    for captures in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, 1)).to(DEVICE)
        run: Any = capture(net) if captures else net
        kept: list[Tensor] = []
        for number in range(8):
            net.zero_grad()
            with torch.enable_grad():
                out = run(of(number, 4, 33))
                out.square().mean().backward()
            grad = net[0].weight.grad
            assert grad is not None
            kept += [out.detach(), from_dlpack(grad)]
        values.append([tensor.tolist() for tensor in kept])
    assert values[0] == values[1]


def test_memory_of_kept_outputs_is_their_own() -> None:
    captured = capture(lambda x: x * 2)
    with torch.no_grad():
        for number in range(3):
            captured(of(number, 1 << 20))
        gc.collect()
        before = torch.cuda.memory_allocated(DEVICE)
        kept = [captured(of(number, 1 << 20)) for number in range(50)]
        grown = torch.cuda.memory_allocated(DEVICE) - before
    assert all((output == 2.0 * (number + 1)).all() for number, output in enumerate(kept))
    assert grown <= 1.1 * 50 * (4 << 20)
